"""Text at the router: tokenizers, chat templates, detokenizing, stop strings and tool calls.

Workers use token ids only, so no state of text is lost with a worker. Torch-free.
"""

from baton.text.chat_template import ChatTemplate
from baton.text.detokenizer import Detokenizer
from baton.text.model_files import text_fingerprint
from baton.text.stop_strings import StopStrings, check_stop_strings
from baton.text.tokenizer import MAX_CHARS_AT_ONCE, Tokenizer, load_tokenizer

__all__ = [
    "MAX_CHARS_AT_ONCE",
    "ChatTemplate",
    "Detokenizer",
    "StopStrings",
    "Tokenizer",
    "check_stop_strings",
    "load_tokenizer",
    "text_fingerprint",
]
