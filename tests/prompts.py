"""Twenty prompts of many kinds: questions, code, digits, several scripts, emoji."""

from __future__ import annotations

_VILLAGE = (
    "The cable car was built in {year}, when the village had {people} people and one road. "
    "Every morning the {thing} went up before the first visitors, "
    "and every evening it came down again. "
)
_THINGS = ("milk", "post", "bread", "coal", "school bell", "piano", "new window", "old dog")
_STORY = "".join(
    _VILLAGE.format(year=1900 + 7 * i, people=350 + 41 * i, thing=_THINGS[i % len(_THINGS)])
    for i in range(14)
)
_RECORDS = "\n".join(
    f"{i:03d}, {(i * 7919) % 1000:>4}, {(i * i * 31) % 97:>3}, row-{chr(97 + i % 26)}"
    for i in range(40)
)
_CODE = '''\
def checksum(data: bytes, modulus: int = 65521) -> int:
    """Return the Adler-32 checksum of data."""
    low, high = 1, 0
    for byte in data:
        low = (low + byte) % modulus
        high = (high + low) % modulus
    return (high << 16) | low


class Ring:
    """A buffer of fixed size that overwrites its oldest entry."""

    def __init__(self, size: int) -> None:
        self.items = [None] * size
        self.next = 0

    def push(self, item: object) -> None:
        self.items[self.next] = item
        self.next = (self.next + 1) % len(self.items)

    def newest(self, count: int) -> list[object]:
        begin = self.next - count
        return [self.items[i % len(self.items)] for i in range(begin, self.next)]

'''

LONG_PROMPTS = (
    _STORY + "In one sentence, what is this text about?",
    "index, value, remainder, name\n" + _RECORDS + "\n",
    _CODE * 3 + "# A class that counts how often each word occurs:\nclass",
)
"""Three of over 600 tokens (of the default model's tokenizer)."""

SHORT_PROMPTS = (
    "What is the capital of Austria, and which river runs through it?",
    "Why does ice float on water?",
    "Write a haiku about a ski lift in the fog.",
    "def fibonacci(n):\n    ",
    "SELECT name, COUNT(*) FROM riders\nWHERE",
    '{"name": "Ada", "born": 1815, "languages": [',
    "2, 3, 5, 7, 11, 13,",
    "1234567890 + 9876543210 =",
    "3.14159265358979",
    "Die Bergbahn fährt heute nicht, weil",
    "Le matin, la montagne est",
    "Сегодня утром на горе",  # noqa: RUF001
    "山の上のホテルは",
    "今天的天气很好，我们",  # noqa: RUF001
    "في الصباح الباكر",
    "🎿🏔️ + ☕ = ",
    "<|im_start|>user\nName three mountains.<|im_end|>\n<|im_start|>assistant\n",
)

PROMPTS = SHORT_PROMPTS + LONG_PROMPTS
"""All twenty."""
