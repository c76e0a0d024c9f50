"""Grammars of the text that a tool takes, as rules within the grammar of a call.

A Lark grammar gets names of its own, so that it can stand in another one. Where a format writes the
text as a JSON string, each terminal is rewritten to the characters that JSON writes for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from baton.generation.sampling_params import StructuredOutput

# JSON's escapes. Other control characters have none of two characters, and cannot be written.
_ESCAPES = {char: json.dumps(char)[1:-1] for char in '"\\\b\f\n\r\t'}
_SPECIAL = (*map(chr, range(32)), '"', "\\")
_NOT_PLAIN = r'["\\\x00-\x1f]'
_MAX_DEFINITIONS = 1000
_MAX_DEPTH = 64  # of brackets
_UNWRITABLE = "a control character that JSON has no short escape for"
_LARK = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<space>[ \t]+)
    |(?P<line>\r?\n)
    |%import[ \t]+common[ \t]*\.[ \t]*(?P<common>\w+)(?:[ \t]*->[ \t]*(?P<renamed>\w+))?
    |%import[ \t]+common[ \t]*\((?P<several>[\w, \t\n]*)\)
    |(?P<ignore>%ignore\b)
    |"(?P<first>[^"\\]|\\.)"\.\."(?P<last>[^"\\]|\\.)"
    |"(?P<string>(?:\\.|[^"\\\n])*)"(?P<case>i?)
    |/(?P<regex>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*)
    |->[ \t]*(?P<alias>\w+)
    |(?P<name>[!?]*_?[A-Za-z][\w-]*)
    |(?P<count>~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?|\{[\d, ]*\})
    |(?P<operator>[:|()\[\]+*?&])
    """,
    re.VERBOSE,
)
_DEFINES = re.compile(r"[ \t]*:")
_REGEX = re.compile(
    r"""(?P<code>\\(?:x\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}))
    |(?P<property>\\[pP](?:\{[^}]*\}|.))
    |(?P<escape>\\.)
    |(?P<class>\[\^?\]?(?:\\.|[^\]\\\[])*\])
    |(?P<open>\()(?:\?(?P<switches>[a-zA-Z-]*)(?P<switched>[:)])|\?P?<\w+>)?
    |(?P<close>\))
    |(?P<syntax>[*+?]|\{\d*,?\d*\}|[|^$])
    |(?P<char>[^\[\\])
    """,
    re.VERBOSE | re.DOTALL,
)
_CODE = re.compile(r"\\[xu](?:\{([0-9a-fA-F]+)\}|([0-9a-fA-F]{4}|[0-9a-fA-F]{2}))")
_ASSERTIONS = ("\\b", "\\B", "\\A", "\\z")
_CLASSES = ("\\d", "\\D", "\\w", "\\W", "\\s", "\\S")
_FLOAT = r"([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+"
# Lark's common terminals, as llguidance has them.
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?({_FLOAT})",
    "NUMBER": f"{_FLOAT}|[0-9]+",
    "SIGNED_NUMBER": f"[+-]?({_FLOAT}|[0-9]+)",
    "ESCAPED_STRING": r'"([^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*([^*]|\*+[^*\/])*\*+\/",
    "SQL_COMMENT": r"--[^\n]*",
}


def text_grammar(
    grammar: StructuredOutput,
    name: str,
    *,
    in_json: bool,
    end: str = "",
    before_token: bool = False,
) -> list[str]:
    """The rules of a text that matches `grammar` and of the `end` behind it.

    The first rule is `name`. `in_json`: the text stands in a JSON string, which ends it; otherwise
    its first `end` does, or the special token behind that if `before_token`. Raises ValueError.
    """
    if grammar.grammar:
        lark = _Lark(grammar.grammar, name, in_json=in_json)
        start, rules = lark.start, lark.rules
    else:
        pattern = _in_json(grammar.regex) if in_json else _with_slashes(grammar.regex)
        start, rules = f"/{pattern}/", []
    shown, terminal = json.dumps(end), name.upper()
    if not end:
        return [f"{name}: {start}", *rules]
    if in_json or start.startswith(name):  # a rule cannot be one terminal with its end
        return [f"{name}: {start} {shown}", *rules]
    if before_token:
        return [f"{name}: {terminal}", f"{terminal}: {start} {shown}", *rules]
    return [f"{name}[suffix={shown}]: {start}", *rules]


Token = tuple[str, str]  # "name", "term" or "syntax", and its text


class _Lark:
    """Rewrites a Lark grammar: `rules`, of which `start`, a rule or a terminal, is the first.

    Definitions that are not recursive become terminals, and so do neighbours in those that are:
    the lexer looks one byte ahead, and could not tell the end of /.*/ from its next escape.
    """

    def __init__(self, text: str, name: str, *, in_json: bool) -> None:
        """Raises ValueError."""
        self._name = name
        self._in_json = in_json
        self._definitions: dict[str, list[Token]] = {}
        self._ignored: list[list[Token]] = []
        self._read(text)
        self.rules = list[str]()
        if "start" not in self._definitions:
            raise ValueError("a tool's grammar needs a rule start")
        names = list(self._definitions)
        recursive = self._recursive()
        self._own = {
            one: f"{name if one in recursive else name.upper()}_{at}"
            for at, one in enumerate(names)
        }
        self._skip = f"{name.upper()}_SKIP" if self._ignored else ""
        if self._skip:
            ignored = " | ".join(map(self._text, self._ignored))
            self.rules.append(f"{self._skip}: ({ignored})+")
        for one, tokens in self._definitions.items():
            skips = bool(self._skip) and one.lstrip("_")[0].islower()
            body = [self._with_skip(token) if skips else token for token in tokens]
            text = self._fused(body) if one in recursive else self._text(body)
            self.rules.append(f"{self._own[one]}: {text}")
        self.start = self._own["start"]

    def _read(self, text: str) -> None:
        """Splits the text into definitions."""
        body, at = list[Token](), 0
        while at < len(text):
            found = _LARK.match(text, at)
            if found is None:
                line, rest = text.count("\n", 0, at) + 1, text[at : at + 20].partition("\n")[0]
                raise ValueError(f"line {line}: {rest!r} is not supported in a tool's grammar")
            at = found.end()
            if name := found["name"]:
                if _DEFINES.match(text, at):
                    body = self._define(name.lstrip("!?"))
                    at = text.index(":", at) + 1
                else:
                    body.append(("name", name))
            elif found["common"]:
                self._import(found["common"], found["renamed"] or found["common"])
            elif (several := found["several"]) is not None:
                for name in several.replace(",", " ").split():
                    self._import(name, name)
            elif found["ignore"]:
                body = []
                self._ignored.append(body)
            elif (term := self._terminal(found)) is not None:
                body.append(("term", term))
            elif found["operator"] or found["count"]:
                body.append(("syntax", found[0]))
            elif found["line"] and self._ignored and body is self._ignored[-1]:
                body = []

    def _define(self, name: str) -> list[Token]:
        if name in self._definitions:
            raise ValueError(f"{name} is defined twice")
        if len(self._definitions) >= _MAX_DEFINITIONS:
            raise ValueError(f"a tool's grammar has {_MAX_DEFINITIONS} definitions at most")
        self._definitions[name] = []
        return self._definitions[name]

    def _import(self, name: str, own: str) -> None:
        if name not in COMMON:
            raise ValueError(f"there is no common.{name}: there are {', '.join(COMMON)}")
        self._define(own).append(("term", self._regex(COMMON[name])))

    def _terminal(self, found: re.Match[str]) -> str | None:
        if found["first"]:
            first, last = (ord(json.loads(f'"{found[key]}"')) for key in ("first", "last"))
            return self._regex(f"[\\x{{{first:x}}}-\\x{{{last:x}}}]")
        if (string := found["string"]) is not None:
            text = json.loads(f'"{string}"')
            if found["case"]:
                return self._regex("".join(f"\\x{{{ord(char):x}}}" for char in text), "i")
            if self._in_json:
                text = "".join(map(_escaped, text))
            return json.dumps(text, ensure_ascii=False)
        return self._regex(found["regex"], found["flags"]) if found["regex"] else None

    def _regex(self, pattern: str, flags: str = "") -> str:
        return f"/{_in_json(pattern, flags)}/" if self._in_json else f"/{pattern}/{flags}"

    def _recursive(self) -> set[str]:
        """Names that lead to a name which leads to itself. Raises ValueError for undefined ones."""
        uses = {
            one: {text for kind, text in body if kind == "name"}
            for one, body in self._definitions.items()
        }
        if unknown := set[str]().union(*uses.values()) - uses.keys():
            raise ValueError(f"{min(unknown)} is not defined")
        regular = set[str]()
        while found := {one for one in uses.keys() - regular if uses[one] <= regular}:
            regular |= found  # all that they use is not recursive
        return uses.keys() - regular

    def _with_skip(self, token: Token) -> Token:
        kind, text = token
        if kind == "syntax" or (kind == "name" and text.lstrip("_")[0].islower()):
            return token
        return "term", f"({self._skip}? {self._own.get(text, text)})"

    def _text(self, tokens: Sequence[Token]) -> str:
        return " ".join(self._own[text] if kind == "name" else text for kind, text in tokens)

    def _fused(self, tokens: Sequence[Token]) -> str:
        """The body of a recursive rule, with neighbours that are not recursive as one terminal."""
        parts, run, at = list[str](), list[str](), 0

        def end_run() -> None:
            if run:
                terminal = f"{self._name.upper()}_RUN_{len(self.rules)}"
                self.rules.append(f"{terminal}: {' '.join(run)}")
                parts.append(terminal)
                run.clear()

        while at < len(tokens):
            kind, text = tokens[at]
            if kind == "syntax" and text == "|":
                end_run()
                parts.append(text)
                at += 1
                continue
            end = _end_of_item(tokens, at)
            item = tokens[at:end]
            at = end
            if all(one != "name" or self._own[of].isupper() for one, of in item):
                run.append(self._text(item))
                continue
            end_run()
            if kind == "syntax":
                close = max(i for i, one in enumerate(item) if one[1] in ")]")
                inner = self._fused(item[1:close])
                parts.append(f"{text}{inner}{self._text(item[close:])}")
            else:
                parts.append(self._text(item))
        end_run()
        return " ".join(parts)


def _end_of_item(tokens: Sequence[Token], at: int) -> int:
    """The place behind a name, terminal or group, and what repeats it."""
    depth = 0
    while at < len(tokens):
        kind, text = tokens[at]
        if kind == "syntax" and text in "([":
            depth += 1
            if depth > _MAX_DEPTH:
                raise ValueError(f"brackets may be nested {_MAX_DEPTH} deep at most")
        elif kind == "syntax" and text in ")]":
            depth -= 1
        at += 1
        if depth <= 0:
            break
    if depth:
        raise ValueError("a bracket is not closed")
    while at < len(tokens) and tokens[at][0] == "syntax" and tokens[at][1] not in "|([)]":
        at += 1
    return at


def _escaped(char: str) -> str:
    if char in _SPECIAL and char not in _ESCAPES:
        raise ValueError(f"{char!r} is {_UNWRITABLE}")
    return _ESCAPES.get(char, char)


def _with_slashes(pattern: str) -> str:
    """A regular expression for Lark, where a slash ends it."""
    return re.sub(r"(?s)\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern)


def _in_json(pattern: str, flags: str = "") -> str:
    """A regular expression of what JSON writes for the texts of another one. Raises ValueError."""
    return "".join(_json_parts(pattern, flags))


def _json_parts(pattern: str, flags: str) -> Iterator[str]:
    open_flags, at = [_switched("", flags)], 0
    while at < len(pattern):
        found = _REGEX.match(pattern, at)
        if found is None:
            raise ValueError(f"character {at + 1} of /{pattern}/: a class within a class")
        at = found.end()
        if found["open"]:
            switched = _switched(open_flags[-1], found["switches"] or "")
            if found["switched"] == ")":
                open_flags[-1] = switched
            else:
                open_flags.append(switched)
                yield "(?:"
        elif found["close"]:
            if len(open_flags) > 1:
                open_flags.pop()
            yield ")"
        elif found["syntax"] or found[0] in _ASSERTIONS:
            yield found[0]
        else:
            yield _json_atom(found, open_flags[-1])


def _switched(flags: str, switches: str) -> str:
    on, _, off = switches.partition("-")
    if not set(on) <= set("ismul"):
        raise ValueError(f"(?{switches}) is not supported in a tool's grammar")
    return "".join(sorted((set(flags) | set(on)) & set("is") - set(off)))


def _json_atom(found: re.Match[str], flags: str) -> str:
    """What JSON writes for one character of a regular expression."""
    atom = found[0]
    if found["property"]:
        if not re.fullmatch(r"\\p(\{[LNM]\w?\}|[LNM])", atom):
            raise ValueError(
                f"{atom} is not supported in a tool's grammar: use \\p{{L}} or \\p{{N}}"
            )
        return atom
    is_class = bool(found["class"]) or atom in _CLASSES or atom == "."
    in_python = _CODE.sub(lambda code: f"\\U{int(code[1] or code[2], 16):08x}", atom)
    try:
        test = re.compile(f"(?{flags}:{in_python})" if flags else in_python)
    except re.error as error:
        raise ValueError(f"{atom} is not supported in a tool's grammar: {error}") from error
    special = [char for char in _SPECIAL if test.fullmatch(char)]
    if not special:
        atom = r"\/" if atom == "/" else atom
        return f"(?i:{atom})" if "i" in flags else atom
    forms = [_ESCAPES[char].replace("\\", "\\\\") for char in special if char in _ESCAPES]
    if is_class:
        plain = f"[^{_NOT_PLAIN[1:]}" if atom == "." else f"[{atom}--{_NOT_PLAIN}]"
        forms.append(f"(?i:{plain})" if "i" in flags else plain)
    elif not forms:
        raise ValueError(f"{special[0]!r} is {_UNWRITABLE}")
    return f"(?:{'|'.join(forms)})"
