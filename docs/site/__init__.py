"""The documentation as a site: `python -m docs.site` makes it of docs/ and the code."""
