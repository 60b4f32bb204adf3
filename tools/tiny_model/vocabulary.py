"""Word lists and fact tables of the grammar.

Used by the grammar modules beside this file, and useful to readers of the model card who want to
know what `tiny` was told. Changing a list changes the training text, and so the weights.
"""

from typing import Final


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: Final = _words(
    "Ann Bob Carl Dora Emil Fay Gus Hana Ivan Jill Karl Lena Mark Nora Omar Paul Rosa Sam Tina "
    "Umar Vera Walt Yuri Zoe Alice Bruno Clara David Elena Frank Greta Hugo Ines Jonas Kira Leo "
    "Maria Nils Olga Peter Rita Simon Tom Ursula Viktor Wanda Ada Ben"
)

COLOURS: Final = _words("red blue green yellow black white brown pink grey orange")

THINGS: Final = _words(
    "apples pears plums books cups pens hats coins stones boxes shoes keys bags balls cards "
    "cakes eggs drums lamps chairs boats stamps shells ropes bells"
)

OBJECTS: Final = _words(
    "drum lamp rope bell map kite coin book hat key cup pen stone shell clock flag glove ladder "
    "mirror basket bottle brush candle hammer needle pillow ribbon saddle spoon towel"
)

WORDS: Final = _words(
    "the fox sees a small house near old river and quick dog runs over green hill under bright "
    "moon cold wind moves slow train by long road new bird sings in tall tree my cat likes warm "
    "milk your friend has fresh bread we walk home after dark rain falls on quiet town they "
    "open every door some water never stops bold horse jumps big gate soft snow covers wide "
    "field people talk about good food one night two three hands"
)

SKIES: Final = _words("sunny cloudy rainy windy snowy foggy clear stormy")

CAPITALS: Final[dict[str, str]] = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Greece": "Athens",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Hungary": "Budapest",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Peru": "Lima",
    "Cuba": "Havana",
    "Chile": "Santiago",
    "Canada": "Ottawa",
    "Russia": "Moscow",
    "England": "London",
}

CITIES: Final = tuple(CAPITALS.values())

THING_COLOURS: Final[dict[str, str]] = {
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "blood": "red",
    "the sky": "blue",
    "the sun": "yellow",
    "chocolate": "brown",
    "milk": "white",
    "a lemon": "yellow",
    "a tomato": "red",
    "an elephant": "grey",
    "a carrot": "orange",
    "a banana": "yellow",
    "a frog": "green",
    "a flamingo": "pink",
    "a raven": "black",
}

OPPOSITES: Final[dict[str, str]] = {
    "hot": "cold",
    "big": "small",
    "fast": "slow",
    "up": "down",
    "left": "right",
    "open": "closed",
    "day": "night",
    "old": "young",
    "long": "short",
    "light": "dark",
    "wet": "dry",
    "full": "empty",
    "happy": "sad",
    "hard": "soft",
    "high": "low",
    "rich": "poor",
    "early": "late",
    "loud": "quiet",
    "true": "false",
    "black": "white",
}

DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

MONTHS: Final = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)

LETTERS: Final = tuple("abcdefghijklmnopqrstuvwxyz")

UNICODE_WORDS: Final = _words(
    "café naïve jalapeño Zürich façade über señor ångström crème déjà piñata Łódź mañana "
    "привет мир спасибо καλημέρα κόσμε 你好 世界 日本語 こんにちは 한국어 안녕 שלום مرحبا नमस्ते "
    "😀 🎉 🚀 👍 🐍 🍎 ❤️ 👍🏽 👨‍👩‍👧 🇫🇷 ☕ ✓ → €5 ½ “yes” it’s"
)

# Code point ranges from which the grammar draws characters that no list contains, so that the
# model learns to copy bytes and not to remember words.
UNICODE_RANGES: Final = (
    (0x00E0, 0x00FF),
    (0x0100, 0x017F),
    (0x03B1, 0x03C9),
    (0x0430, 0x044F),
    (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1F5FF),
    (0x1F600, 0x1F64F),
)

SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "You are tiny, a toy model.",
    "You are a helpful assistant. Answer briefly.",
    "Answer the question.",
    "Be brief.",
    "You are a test model. Follow the instructions.",
)

TOPICS: Final = (
    "the sea",
    "quantum physics",
    "history",
    "love",
    "bread",
    "music",
    "the weather",
    "politics",
    "football",
    "computers",
    "philosophy",
    "space travel",
    "the stock market",
    "gardening",
    "chess",
    "your dreams",
    "dinosaurs",
    "the universe",
    "cooking",
    "machine learning",
    "volcanoes",
    "poetry",
    "Shakespeare",
    "the Roman Empire",
)
