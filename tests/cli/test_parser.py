"""The values of a command line, with argparse and without."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_aio.cli.options import plain_values
from elastic_aio.cli.parser import option_parser
from elastic_aio.cli.run_options import RUN_OPTIONS
from elastic_aio.spec.checks import UsageError

VALUES = st.sampled_from(["", "1", "-1", "a b", "=", "a=b", "0:3,1:1", "-x", "-r 1"])
WORDS = st.sampled_from(RUN_OPTIONS).flatmap(
    lambda option: st.one_of(
        st.just(f"--{option.name}") if option.is_flag else VALUES.map(f"--{option.name}=".__add__),
        VALUES.map((option.short or f"--{option.name}=").__add__),
    )
)


@given(words=st.lists(WORDS, max_size=4))
def test_plain_values_are_those_of_argparse(words: list[str]) -> None:
    """None where argparse finds an error, or reads the words in another way."""
    found = plain_values(words, RUN_OPTIONS)
    parser = option_parser(RUN_OPTIONS, "run")
    if found is not None:
        assert found == vars(parser.parse_args(words))
    elif not any((word.startswith("-") and word[2:3] == "=") or "==" in word for word in words):
        with pytest.raises(UsageError):
            parser.parse_args(words)


def test_the_help_is_for_argparse() -> None:
    assert plain_values(["-h"], RUN_OPTIONS) is None
    assert plain_values(["--help"], RUN_OPTIONS) is None
    assert plain_values(["-r3", "--quiet"], RUN_OPTIONS) is not None
