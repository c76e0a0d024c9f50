"""Inputs near the edge of being valid: seeds, and what is changed in them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

_WORDS = [
    *(b"null", b"true", b"-1", b"0", b"1e999", b"NaN", b"18446744073709551616", b"[]", b"{}"),
    *(b"\x00", b"\xff\xfe", b"\xed\xa0\x80", "\u202e😀".encode(), b"\\ud800", b"%s%n", b'""'),
    *(b"{% for i in range(10**9) %}", b"{{ x.__class__ }}", b"{%", b"{{", b"}}", b"../passwd"),
    *(b"Transfer-Encoding: chunked\r\n", b"Content-Length: -1\r\n", b"HTTP/9.9", b"\r\n\r\n"),
    *(
        b"a" * 5000,
        b"[" * 2000,
        b'{"a":' * 2000,
        b"\x08" + b"\xff" * 9 + b"\x01",
        b"\x0a\xff\xff\x03",
    ),
]


class Mutator:
    """Changes seeds and what it made of them before; the same seed makes the same inputs."""

    def __init__(self, seed: int, seeds: Sequence[bytes], most_bytes: int = 20_000) -> None:
        self._random = random.Random(seed)
        self._seeds = list(seeds)
        self._most_bytes = most_bytes

    def next(self) -> bytes:
        """One input: mostly a seed with one to four changes, sometimes noise."""
        rng = self._random
        if rng.random() < 0.02:
            return rng.randbytes(rng.randrange(200))
        data = bytearray(rng.choice(self._seeds))
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            self._change(data)
        return bytes(data[: self._most_bytes])

    def _change(self, data: bytearray) -> None:
        rng = self._random
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 2, 8, 64)))
        match rng.randrange(7):
            case 0:
                data[at:at] = rng.choice(_WORDS)
            case 1:
                data[at:end] = rng.choice(_WORDS)
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = data[at:end] * rng.choice((1, 2, 50))
            case 4 if end > at:
                data[at] ^= 1 << rng.randrange(8)
            case 5:
                other = rng.choice(self._seeds)
                cut = rng.randrange(len(other) + 1)
                data[at:end] = other[cut : cut + 64]
            case _:
                data[at:end] = str(rng.choice((0, -1, 2**31, 2**63, 2**64, 1e308))).encode()


HTTP = [
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b'content-length: 62\r\n\r\n{"prompt":[1,2,3],"max_tokens":3,"stream":true,"temperature":0}',
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    b'3f\r\n{"messages":[{"role":"user","content":"hello"}],"max_tokens":3}\r\n0\r\n\r\n',
    b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer key\r\n\r\n",
    b"GET /openapi.json HTTP/1.0\r\n\r\nGET /health HTTP/1.1\r\n\r\n",
    b"POST /v1/files HTTP/1.1\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    b"content-length: 166\r\n\r\n--b\r\ncontent-disposition: form-data; name=purpose\r\n\r\n"
    b"batch\r\n"
    b'--b\r\ncontent-disposition: form-data; name=file; filename="x"\r\n\r\n'
    b'{"custom_id":"1","method":"POST"}\r\n--b--\r\n',
    b"POST /v1/batches HTTP/1.1\r\ncontent-length: 85\r\n\r\n"
    b'{"input_file_id":"file-0","endpoint":"/v1/completions","completion_window":"24h" }   ',
    b"GET /v1/files?limit=2&after=file-0&order=asc HTTP/1.1\r\n\r\n",
    b"POST /v1/batches/batch_0/cancel HTTP/1.1\r\norigin: http://x\r\ncontent-length: 0\r\n\r\n",
    b"DELETE /v1/files/file-0/../x HTTP/1.1\r\n\r\n",
    b'POST /tokenize HTTP/1.1\r\ncontent-length: 14\r\n\r\n{"prompt":"x"}',
    b"GET /v1/responses/resp_0/input_items?limit=1&after=x&order=asc HTTP/1.1\r\n\r\n",
    b"DELETE /v1/responses/resp_0 HTTP/1.1\r\n\r\n",
    b"POST /v1/responses HTTP/1.1\r\ncontent-length: 48\r\n\r\n"
    b'{"input":"x","background":true,"stream":false}  ',
    b"POST /v1/messages HTTP/1.1\r\nx-api-key: key\r\nanthropic-version: 2023-06-01\r\n"
    b'content-length: 77\r\n\r\n{"max_tokens":3,"stream":true,"messages":[{"role":"user",'
    b'"content":"hello"}]}',
    b"POST /v1/messages/count_tokens HTTP/1.1\r\ncontent-length: 48\r\n\r\n"
    b'{"messages":[{"role":"user","content":"hello"}]}',
]
BATCHES = [
    b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}\n'
    b'{"custom_id":"b","method":"POST","url":"/v1/completions","body":{"prompt":[1],"n":2}}\n',
    b'{"custom_id":"\\u00e9","method":"POST","url":"/v1/completions","body":{"stream":true}}\n\n',
]
COMPLETIONS = [
    b'{"prompt":"def f(x):","max_tokens":8,"temperature":0.5,"top_p":0.9,"top_k":5,"seed":1,"n":2}',
    b'{"prompt":[[1,2],[3]],"stop":["a","b"],"logprobs":2,"stream":true,'
    b'"stream_options":{"include_usage":true}}',
    b'{"prompt":["a","b"],"logit_bias":{"5":-100},"priority":"high","cache_salt":"s","echo":true}',
]
CHATS = [
    b'{"messages":[{"role":"system","content":"s"},{"role":"user","content":'
    b'[{"type":"text","text":"t"}]}],"max_completion_tokens":4,"logprobs":true,"top_logprobs":1}',
    b'{"messages":[{"role":"user","content":"x"}],"tools":[],"response_format":{"type":"text"}}',
]
MESSAGES = [
    b'{"model":"m","max_tokens":3,"system":[{"type":"text","text":"s"}],"messages":[{"role":"user",'
    b'"content":"x"},{"role":"assistant","content":[{"type":"thinking","thinking":"t","signature":'
    b'"s"},{"type":"tool_use","id":"1","name":"f","input":{"a":[1]}}]},{"role":"user","content":['
    b'{"type":"tool_result","tool_use_id":"1","is_error":true,"content":[{"type":"text","text":'
    b'"r"}]}]}],"tools":[{"name":"f","input_schema":{"type":"object"}},{"type":"web_search_1",'
    b'"name":"w"}],"tool_choice":{"type":"tool","name":"f","disable_parallel_tool_use":true}}',
    b'{"max_tokens":3,"stream":true,"stop_sequences":["a"],"metadata":{"user_id":"u"},"top_k":2,'
    b'"thinking":{"type":"enabled","budget_tokens":9,"display":"omitted"},"messages":[{"role":'
    b'"user","content":[{"type":"text","text":"x"}]},{"role":"assistant","content":"y"}],'
    b'"output_config":{"effort":"low","format":{"type":"json_schema","schema":{}}}}',
]
RESPONSES = [
    b'{"input":[{"role":"user","content":[{"type":"input_text","text":"x"}]},{"type":"reasoning",'
    b'"content":[{"type":"reasoning_text","text":"t"}]},{"type":"function_call","call_id":"1",'
    b'"name":"f","arguments":"{}"},{"type":"function_call_output","call_id":"1","output":"r"}],'
    b'"tools":[{"type":"function","name":"f"},{"type":"web_search"}],"truncation":"auto"}',
    b'{"input":"x","previous_response_id":"resp_0","store":false,"background":true,"top_logprobs":'
    b'2,"include":["message.output_text.logprobs"],"text":{"format":{"type":"json_object"}}}',
]
TEMPLATES = [
    b"{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}{% endfor %}"
    b"{% if add_generation_prompt %}<|assistant|>{% endif %}",
    b"{%- set ns = namespace(found=false) -%}{%- for m in messages[1:] -%}{%- if loop.first -%}"
    b"{%- set ns.found = true -%}{%- endif -%}{{ m | tojson }}{%- endfor -%}{{ ns.found }}",
    b"{{ raise_exception('roles must alternate') if messages | length > 5 else bos_token }}",
]
MODEL_CONFIGS = [
    b'{"architectures":["LlamaForCausalLM"],"hidden_size":64,"intermediate_size":128,'
    b'"num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"vocab_size":300,'
    b'"max_position_embeddings":256,"rms_norm_eps":1e-5,"rope_theta":10000.0,"eos_token_id":[0,2],'
    b'"torch_dtype":"bfloat16","tie_word_embeddings":false}',
    b'{"architectures":["Qwen2ForCausalLM"],"hidden_size":64,"intermediate_size":128,'
    b'"num_hidden_layers":2,"num_attention_heads":4,"vocab_size":300,"use_sliding_window":true,'
    b'"sliding_window":32,"max_window_layers":1,"rope_scaling":{"rope_type":"yarn","factor":4.0}}',
]
WEIGHTS = [
    (len(header)).to_bytes(8, "little") + header + bytes(64)
    for header in (
        b'{"a":{"dtype":"F32","shape":[4,4],"data_offsets":[0,64]},"__metadata__":{"format":"pt"}}',
        b'{"a":{"dtype":"BF16","shape":[16],"data_offsets":[0,32]},'
        b'"b":{"dtype":"I8","shape":[32],"data_offsets":[32,64]}}',
    )
]
RECORDS = [
    b'{"incarnation":"w","role":"WORKER_ROLE_DECODE","address":"127.0.0.1:7720","pid":7,'
    b'"hostId":"h","state":"WORKER_STATE_READY","model":"m","blocksTotal":"9",'
    b'"kv":{"numLayers":2}}',
]
RANKING = [
    b'{"query":"q","documents":["a",{"text":"b"}],"top_n":1,"return_documents":false,'
    b'"instruction":"i","truncate_prompt_tokens":4,"priority":-1}',
]
SCORES = [
    b'{"text_1":"a","text_2":["b","c"],"use_activation":false,"request_id":"r"}',
    b'{"queries":["a"],"documents":["b"]}',
    b'{"data_1":"a","data_2":"b","instruction":"i"}',
]
POOLING = [
    b'{"input":["a",""],"task":"embed","dimensions":4,"encoding_format":"base64","user":"u"}',
    b'{"input":[[1,2],[3]],"task":"classify","add_special_tokens":false,"use_activation":true}',
]
TOKENIZE = [
    b'{"prompt":"x","add_special_tokens":false,"return_token_strs":true}',
    b'{"messages":[{"role":"user","content":"x"}],"continue_final_message":true,'
    b'"add_generation_prompt":false,"chat_template_kwargs":{"a":1}}',
]
STORED = [
    b'{"input":"x","max_output_tokens":2,"store":true,"previous_response_id":"resp_0"}',
    b'{"input":"x","max_output_tokens":200,"background":true,"metadata":{"a":"b"}}',
    b'{"input":[{"role":"user","content":"x"},{"type":"item_reference","id":"msg_0"},{"type":'
    b'"custom_tool_call","call_id":"1","name":"c","input":"i"},{"type":"custom_tool_call_output",'
    b'"call_id":"1","output":"o"}],"max_output_tokens":2,"stream":true,"conversation":"conv_0"}',
]
ITEMS = [
    b'{"items":[{"type":"message","role":"user","content":"x"},{"type":"function_call","call_id":'
    b'"1","name":"f","arguments":"{}"}],"metadata":{"a":"b"}}',
]
_NEW_BATCH = (
    b'{"input_file_id":"file-0","endpoint":"/v1/completions","completion_window":"24h",'
    b'"metadata":{"a":"b"}}'
)
_OPTIONS = b'"max_tokens":2,"n":3,"top_k":2,"min_p":0.1,"stop":"x","logit_bias":{"5":1}'
# By method and path, the bodies of well-formed requests. Ids of what was stored before replace
# `resp_0`, `conv_0`, `file-0` and `batch_0`.
REQUESTS: dict[str, Sequence[bytes]] = {
    "POST /v1/completions": COMPLETIONS,
    "POST /v1/chat/completions": [*CHATS, CHATS[0].replace(b'"max_completion_tokens":4', _OPTIONS)],
    "POST /v1/completions/render": COMPLETIONS,
    "POST /v1/chat/completions/render": CHATS,
    "POST /v1/messages": MESSAGES,
    "POST /v1/messages/count_tokens": MESSAGES,
    "POST /v1/responses": [*RESPONSES, *STORED],
    "POST /v1/responses/input_tokens": RESPONSES,
    "POST /v1/conversations": ITEMS,
    "POST /v1/conversations/conv_0": ITEMS,
    "POST /v1/conversations/conv_0/items": ITEMS,
    **dict.fromkeys(
        ("GET /v1/conversations/conv_0/items?limit=2", "DELETE /v1/conversations/conv_0",
         "GET /v1/responses/resp_0", "GET /v1/responses/resp_0?stream=true",
         "GET /v1/responses/resp_0/input_items?limit=2", "DELETE /v1/responses/resp_0",
         "POST /v1/responses/resp_0/cancel", "GET /v1/files?limit=2",
         "GET /v1/files/file-0/content", "DELETE /v1/files/file-0", "GET /v1/batches/batch_0",
         "POST /v1/batches/batch_0/cancel", "GET /v1/batches?limit=2", "GET /metrics",
         "GET /openapi.json"),
        (b"",),
    ),
    "POST /v1/rerank": RANKING,
    "POST /score": SCORES,
    "POST /classify": POOLING,
    "POST /pooling": POOLING,
    "POST /v1/embeddings": POOLING,
    "POST /tokenize": TOKENIZE,
    "POST /detokenize": [b'{"tokens":[1,2,3]}'],
    "POST /v1/batches": [_NEW_BATCH],
    "POST /v1/files": BATCHES,
}  # fmt: skip


def _large() -> dict[str, Sequence[bytes]]:
    """Bodies that take a router as long as a caller can make them, by method and path."""
    user = [{"role": "user", "content": "x"}]
    names = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(900)}}
    patterns = {f"^a{i}[a-z]*$": {"type": "string"} for i in range(8)}
    schemas: list[Any] = [
        names,
        {**names, "patternProperties": patterns},
        {"enum": [i + 0.5 for i in range(8000)]},
        {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]}
                   for i in range(900)} | {"d900": {}}, "$ref": "#/$defs/d0"},
        {"type": "object", "properties": {f"x{i}": {"type": "object", "patternProperties": {
            f"^{i}[a-z]*$": {}}, "properties": names["properties"]} for i in range(1)}},
    ]  # fmt: skip
    functions = [{"type": "function", "function": {"name": f"f{i}", "parameters": {
        "type": "object", "properties": {f"p{j}": {"type": "string"} for j in range(12)}}}}
        for i in range(128)]  # fmt: skip
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":' * 700}}]
    completions: list[Any] = [
        {"prompt": ["x"] * 1024, "max_tokens": 8},
        {"prompt": ["x"] * 8, "n": 128, "max_tokens": 8},
        {"prompt": ["x"] * 1000 + [[1]]},
        {"prompt": [[1]] * 1023 + [[99999]], "max_tokens": 1},
        {"prompt": "x", "bad_words": [f"{'w o r d ' * 31}{i}" for i in range(250)]},
        {"prompt": "x", "guided_choice": [f"choice number {i}" for i in range(3000)]},
        {"prompt": "x", "guided_regex": "(a|b|c)*" * 2000},
        {"prompt": "x", "logit_bias": {str(i): 1 for i in range(300)}, "logprobs": 20},
        {"prompt": [5] * 2040, "max_tokens": 1, "prompt_logprobs": 20},
        {"prompt": "\U0001f600 e\u0301" * 800, "max_tokens": 1},
        *({"prompt": "x", "structured_outputs": {"json": schema}} for schema in schemas),
    ]
    chats: list[Any] = [
        {"messages": user * 1700},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1900}]},
        {"messages": [*user, {"role": "assistant", "tool_calls": calls}, *user]},
        {"messages": user, "tools": functions, "tool_choice": "required"},
        {"messages": user, "chat_template_kwargs": {f"k{i}": [1, 2, 3] for i in range(900)}},
    ]
    tools = [[{"name": "f", "input_schema": schema}] for schema in schemas]
    listed: dict[str, list[Any]] = {
        "/v1/completions": completions,
        "/v1/chat/completions": chats,
        "/v1/messages": [{"max_tokens": 2, "messages": user, "tools": one} for one in tools],
        "/v1/messages/count_tokens": [{"messages": user, "tools": one} for one in tools],
        "/v1/responses": [
            {"input": user * 1500},
            {"input": "x", "max_output_tokens": 2, "tools": [
                {"type": "function", **one["function"]} for one in functions]},
        ],
        "/v1/rerank": [{"query": "a", "documents": ["b"] * 2048}],
        "/score": [{"text_1": "a", "text_2": ["b"] * 2048}],
        "/pooling": [{"input": ["x"] * 2048}, {"input": [[1]] * 2048}],
        "/v1/embeddings": [{"input": ["x"] * 2048, "encoding_format": "base64"}],
        "/tokenize": [{"prompt": "a b " * 8000, "return_token_strs": True}],
        "/detokenize": [{"tokens": [5] * 4096}, {"tokens": [5] * 200_000}],
    }  # fmt: skip
    return {
        f"POST {path}": [json.dumps(body).encode() for body in bodies]
        for path, bodies in listed.items()
    }


LARGE = _large()
