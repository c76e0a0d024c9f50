"""How families of models write tool calls: parsers and grammars, over one scanner."""

from baton.text.tool_parsers.format import ToolFormat
from baton.text.tool_parsers.parser import ParsedText, ToolParser, ToolSchemas
from baton.text.tool_parsers.table import FORMATS, tool_format

__all__ = ["FORMATS", "ParsedText", "ToolFormat", "ToolParser", "ToolSchemas", "tool_format"]
