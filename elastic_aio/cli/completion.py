"""`aio-elastic completion SHELL`: print a script that completes commands and options.

::

    source <(aio-elastic completion bash)     # in ~/.bashrc
    source <(aio-elastic completion zsh)      # in ~/.zshrc, after compinit
    aio-elastic completion fish | source      # in ~/.config/fish/config.fish

The scripts are made from the parsers of the commands, so that they know each option.

shtab, which makes such scripts from one parser with sub-parsers, is unfit: its scripts offer the
launcher's options after the script of the job too, where all words are the script's, and know one
command, so that `aio-torchrun` needs a second script.  For bash they have 18.6 KB, these 5.1 KB.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from elastic_aio.cli.options import print_error
from elastic_aio.cli.parser import OptionParser
from elastic_aio.spec.checks import UsageError, invalid_value
from elastic_aio.text import did_you_mean

_SHELLS: Final = ("bash", "zsh", "fish")
_NESTED: Final = (("store", "ping"),)
"""Commands with two words."""


class _Completion(Struct, frozen=True):
    names: tuple[str, ...]
    takes_value: bool
    help: str


Commands = dict[tuple[str, ...], list[_Completion]]
"""The options of each command, by its words: `("run",)`, `("store", "ping")`."""


def main_completion(argv: Sequence[str]) -> int:
    """Run `aio-elastic completion`; return the exit code, 2 for invalid arguments."""
    try:
        shell = _parser().parse_args(argv).shell
        if shell not in _SHELLS:
            problem = f"must be 'bash', 'zsh' or 'fish'{did_you_mean(shell, _SHELLS)}"
            raise invalid_value("shell", problem, shell)
    except UsageError as error:
        return print_error("completion", str(error), 2)
    write: dict[str, Callable[[Commands], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    print(write[shell](_commands()), end="")
    return 0


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="aio-elastic completion",
        description="Print a script that completes the commands and options of aio-elastic and"
        " aio-torchrun; the shell has to source it.",
        epilog="In ~/.bashrc: source <(aio-elastic completion bash); in ~/.zshrc, after compinit:"
        " source <(aio-elastic completion zsh); in ~/.config/fish/config.fish: aio-elastic"
        " completion fish | source",
    )
    parser.add_argument("shell", help="bash, zsh or fish")
    return parser


def _commands() -> Commands:
    """Return all commands with their options, from the parsers that print their help."""
    from elastic_aio.cli import COMMANDS, main

    commands: Commands = {}
    try:
        for words in (("run",), *((name,) for name in COMMANDS), *_NESTED):
            captured = OptionParser.captured = []
            try:
                main([*words, "--help"])
            except SystemExit:
                pass  # argparse, after the help
            commands[words] = [_completion(action) for action in _actions(captured)]
    finally:
        OptionParser.captured = None
    return commands


def _actions(parsers: Sequence[OptionParser]) -> list[argparse.Action]:
    return [action for parser in parsers for action in parser._actions if action.option_strings]


def _completion(action: argparse.Action) -> _Completion:
    text = " ".join((action.help or "").split()).replace("%%", "%")
    # Up to the first remark: a menu has one short line for each option.
    text = re.split(r"[;:(\[]", text, maxsplit=1)[0].strip()
    names = tuple(name for name in action.option_strings if "_" not in name)
    return _Completion(names, action.nargs != 0, text)


def _lines_by_command(commands: Commands) -> list[tuple[str, list[_Completion]]]:
    return [(" ".join(words), options) for words, options in commands.items()]


_BASH: Final = """\
# Completion of aio-elastic and aio-torchrun in bash.
_aio_elastic() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
  local command=run first=1 options valued i
  COMPREPLY=()
  if [ "${{COMP_WORDS[0]##*/}}" = aio-elastic ]; then
    if [ "$COMP_CWORD" = 1 ]; then
      COMPREPLY=($(compgen -W "{names} --help --version" -- "$word"))
      return
    fi
    command=${{COMP_WORDS[1]}} first=2
    case "$command ${{COMP_WORDS[2]}}" in
      {nested}) command="$command ${{COMP_WORDS[2]}}" first=3 ;;
    esac
  fi
  case "$command" in
{cases}
  esac
  for ((i = first; i < COMP_CWORD; i++)); do
    case "${{COMP_WORDS[i]}}" in
      -*)
        case " $valued " in *" ${{COMP_WORDS[i]}} "*) ((i++)) ;; esac
        [ "${{COMP_WORDS[i]}}" = = ] && ((i++)) # bash splits `--name=value` into three words
        ;;
      *) COMPREPLY=($(compgen -f -- "$word")); return ;; # after the script
    esac
  done
  case " $valued = " in
    *" $before "*) COMPREPLY=($(compgen -f -- "$word")); return ;;
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
    *) COMPREPLY=($(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -o bashdefault -F _aio_elastic aio-elastic aio-torchrun
"""


def _bash(commands: Commands) -> str:
    cases = []
    for command, options in _lines_by_command(commands):
        names = " ".join(name for option in options for name in option.names)
        valued = " ".join(name for option in options if option.takes_value for name in option.names)
        cases.append(f"    '{command}') options='{names}' valued='{valued}' ;;")
    names = " ".join(words[0] for words in commands if len(words) == 1)
    nested = "|".join(f"'{' '.join(words)}'" for words in commands if len(words) == 2)
    return _BASH.format(names=names, nested=nested, cases="\n".join(cases))


_ZSH: Final = """\
# Completion of aio-elastic and aio-torchrun in zsh.
_aio_elastic() {{
  local command=run
  if [[ ${{words[1]:t}} = aio-elastic ]]; then
    if (( CURRENT == 2 )); then
      compadd -- {names} --help --version
      return
    fi
    command=${{words[2]}}
    shift words
    (( CURRENT-- ))
    case "$command ${{words[2]}}" in
      {nested})
        if (( CURRENT > 2 )); then
          command="$command ${{words[2]}}"
          shift words
          (( CURRENT-- ))
        fi
        ;;
    esac
  fi
  case "$command" in
{cases}
    *) _files ;;
  esac
}}
compdef _aio_elastic aio-elastic aio-torchrun
"""


def _zsh(commands: Commands) -> str:
    cases = []
    for command, options in _lines_by_command(commands):
        # Options end at the first argument: what follows belongs to the script (-A).
        words = " \\\n        ".join(
            [*(_zsh_option(option) for option in options), "'*:file:_files'"]
        )
        cases.append(f"    '{command}') _arguments -A '-*' \\\n        {words} ;;")
    names = " ".join(words[0] for words in commands if len(words) == 1)
    nested = "|".join(f"'{' '.join(words)}'" for words in commands if len(words) == 2)
    return _ZSH.format(names=names, nested=nested, cases="\n".join(cases))


def _zsh_option(option: _Completion) -> str:
    text = re.sub(r"[\[\]':\\]", " ", option.help)
    value = ":value:_files" if option.takes_value else ""
    specs = []
    for name in option.names:
        equals = "=" if option.takes_value and name.startswith("--") else ""
        specs.append(f"'{name}{equals}[{text}]{value}'")
    return " ".join(specs)


def _fish(commands: Commands) -> str:
    names = [words[0] for words in commands if len(words) == 1]
    lines = [
        "# Completion of aio-elastic and aio-torchrun in fish.",
        f"complete -c aio-elastic -n __fish_use_subcommand -f -a '{' '.join(names)}'",
    ]
    for command, options in _lines_by_command(commands):
        *outer, last = command.split(" ")
        condition = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in (*outer, last))
        lines += [
            f"complete -c aio-elastic -n '{condition}' {_fish_option(one)}" for one in options
        ]
    lines += [f"complete -c aio-torchrun {_fish_option(one)}" for one in commands[("run",)]]
    return "\n".join(lines) + "\n"


def _fish_option(option: _Completion) -> str:
    words = [f"-l {name[2:]}" if name[:2] == "--" else f"-s {name[1:]}" for name in option.names]
    text = option.help.replace("\\", "\\\\").replace("'", "\\'")
    return " ".join([*words, *(["-r"] if option.takes_value else []), f"-d '{text}'"])
