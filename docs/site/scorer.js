// Order of what a search finds: the pages of users before those of contributors, and before the
// names that stand for torch's.  The numbers beside `score` are those of Sphinx.
var Scorer = {
  score: ([page, , , , score]) => {
    if (/^(guides|reference)\//.test(page)) return score + 4;
    if (/^(api\/elastic_aio\.compat|examples\/|contributing|changelog)/.test(page)) return score - 12;
    return page.includes("/") ? score : score - 4;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
