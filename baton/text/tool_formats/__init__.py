"""How families of models write tool calls: parsers and grammars, over one scanner."""

from baton.text.tool_formats.table import FORMATS, tool_format

__all__ = ["FORMATS", "tool_format"]
