"""What published models and tokenizers are given."""

from typing import Any

CODE = 'def mean(numbers: list[float]) -> float:\n    """The arithmetic mean."""\n    '
PROMPTS = {
    "prose": "Once upon a time, in a village at the foot of a mountain, there lived",
    "fact": "The capital of France is",
    "long": "The keeper of the lighthouse wrote down the weather, the ships and the hours of each night. " * 80
    + "In the morning, the keeper",
    "chinese": "今天天气很好，我们决定去公园散步。公园里",
    "arabic": "كان يا ما كان في قديم الزمان",
    "russian": "Однажды зимой, когда в лесу лежал глубокий снег,",
    "emoji": "Weather report ☀️🌧️❄️: Monday ☀️, Tuesday 🌧️, Wednesday",
    "code": CODE,
    "json": '{"name": "Ada", "born": 1815, "languages": ["English", "French"]}\n{"name": "Alan", "born":',
    "spaces": "one  two   three\n\n\tfour\n    five\n",
}
"""`long` has about 1,500 tokens."""


def _asked(*contents: str) -> list[dict[str, Any]]:
    """Turns of user and assistant, beginning and ending with the user's."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


CAPITAL = _asked("What is the capital of France? Answer in one sentence.")
CONVERSATIONS = {
    "capital": CAPITAL,
    "system": [{"role": "system", "content": "You are a pirate."}, *_asked("Who are you?")],
    "turns": _asked("My name is Ada.", "Nice to meet you, Ada!", "What is my name?"),
    "code": _asked("Write a Python function that reverses a string."),
    "chinese": _asked("你好！请介绍一下你自己。"),
    "arabic": _asked("ما هي عاصمة مصر؟"),
    "russian": _asked("Сколько дней в неделе?"),
    "emoji": _asked("What does 🌧️ mean? And 🎉?"),
}

TOKENIZED = {
    **{name: PROMPTS[name] for name in ("prose", "chinese", "arabic", "russian", "emoji", "code", "json")},
    "empty": "",
    "leading space": " The  quick\n\n fox",
    "leading whitespace": "   \t\n  x",
    "only spaces": " " * 33,
    "line ends": "a\r\nb\rc\n\n\n\nd \n e",
    "hindi and thai": "नमस्ते दुनिया ภาษาไทยไม่มีช่องว่าง",
    "japanese and korean": "日本語のテキスト、カタカナ。한국어 문장입니다.",
    "hebrew and greek": "שלום עולם Καλημέρα κόσμε",
    "combining": "e\u0301a\u0308 \ufb01 \u1e9e ½ ² Å",
    "joined emoji": "👩\u200d👩\u200d👧\u200d👦🏳️\u200d🌈🇫🇷👍🏽",
    "rare": "\u16a0\u16a2\u16a6 \U00010330\U00012000\U0001f9ff",
    "controls": "a\x00b\x07c\x1b[0m\u200b\ufeff\u2028",
    "numbers": "3.14159 1,234,567.89 0x1F -42 1e10 2026-01-31",
    "contractions": "Don't won't it's I'LL they'Ve . , ! ? 'n' it 's",
    "long word": "x" * 300 + "antidisestablishmentarianism",
    "special tokens": "<s>a</s> <bos>b<eos> <|im_start|>user\nc<|im_end|><|eot_id|> [INST] d [/INST]<unk><|endoftext|>",
    "url": "https://example.org/a?b=c&d=%20#e mailto:a@b.example",
}

SYSTEM = {"role": "system", "content": "You answer in one word."}
USER = {"role": "user", "content": "  What is the capital of France?\n"}
TURNS = [USER, {"role": "assistant", "content": "Paris"}, {"role": "user", "content": "And of 日本?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a "city" <now>.',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
CALLED = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "name": "weather", "content": "sunny"},
]
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "plain": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "turns": (TURNS, None),
    "system and turns": ([SYSTEM, *TURNS], None),
    "special token texts": ([{"role": "user", "content": "<s>a</s><|im_end|><|eot_id|><bos>"}], None),
    "tools": ([SYSTEM, USER], [TOOL]),
    "a tool's answer": (CALLED, [TOOL]),
    "two of the user": ([USER, USER], None),
    "thoughts": ([USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nParis"}, USER], None),
}
"""Messages and tools. Not every template takes all of them: it then has to refuse them as in transformers."""
