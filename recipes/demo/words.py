"""The little world that the demo's base model reads about and that its datasets ask about.

Places and animals have fixed properties, so that there is something to know about them; everything
else is drawn anew in every text.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")

GIRLS = ("Mia", "Ada", "Lena", "Rosa", "Nora", "Ivy", "Hana", "Zoe", "Clara", "Tessa")
BOYS = ("Tom", "Ben", "Otto", "Sam", "Leo", "Finn", "Hugo", "Emil", "Jonas", "Karl")
PEOPLE = GIRLS + BOYS

COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "grey", "orange", "pink")
SIZES = ("small", "big", "tiny", "huge", "young", "old", "thin", "round")
THINGS = (
    "ball", "kite", "book", "lamp", "basket", "drum", "key", "hat", "cup", "boat", "bell",
    "ring", "box", "coat", "clock", "spoon", "ladder", "map", "shoe", "chair",
)  # fmt: skip
FRUITS = ("apple", "pear", "plum", "cherry", "lemon", "peach", "melon", "berry")
VEGETABLES = ("carrot", "onion", "potato", "bean", "cabbage", "pumpkin", "tomato", "pepper")
FOODS = ("bread", "soup", "cheese", "rice", "cake", "honey", "porridge", "stew")
ROOMS = ("kitchen", "garden", "cellar", "attic", "hall", "barn", "shop", "school")
TRADES = ("baker", "farmer", "teacher", "sailor", "doctor", "painter", "smith", "gardener")

NUMBERS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen", "twenty",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SEASONS = ("spring", "summer", "autumn", "winter")

GOOD = ("wonderful", "lovely", "great", "pleasant", "delicious", "bright", "kind", "charming")
BAD = ("terrible", "awful", "boring", "dreadful", "bitter", "ugly", "rude", "broken")
GLAD = ("happy", "glad", "proud", "cheerful", "delighted")
SORRY = ("sad", "angry", "tired", "afraid", "upset")

OPPOSITES = (
    ("hot", "cold"), ("big", "small"), ("fast", "slow"), ("old", "young"), ("light", "dark"),
    ("early", "late"), ("wet", "dry"), ("full", "empty"), ("loud", "quiet"), ("high", "low"),
    ("happy", "sad"), ("rich", "poor"), ("near", "far"), ("soft", "hard"), ("open", "closed"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Animal:
    name: str
    legs: str
    food: str
    home: str
    call: str


ANIMALS = (
    Animal("fox", "four", "berries", "the forest", "barks"),
    Animal("hen", "two", "corn", "the farm", "clucks"),
    Animal("cow", "four", "grass", "the meadow", "moos"),
    Animal("owl", "two", "mice", "an old tree", "hoots"),
    Animal("frog", "four", "flies", "the pond", "croaks"),
    Animal("bear", "four", "honey", "a cave", "growls"),
    Animal("duck", "two", "weeds", "the river", "quacks"),
    Animal("goat", "four", "leaves", "the hills", "bleats"),
    Animal("wolf", "four", "meat", "the mountains", "howls"),
    Animal("mouse", "four", "seeds", "a hole in the wall", "squeaks"),
    Animal("crow", "two", "worms", "a tall tower", "caws"),
    Animal("horse", "four", "hay", "the stable", "neighs"),
    Animal("bee", "six", "nectar", "a hive", "buzzes"),
    Animal("dog", "four", "bones", "a kennel", "barks"),
    Animal("cat", "four", "fish", "the house", "purrs"),
    Animal("pig", "four", "turnips", "the sty", "grunts"),
)


@dataclass(frozen=True, slots=True)
class Place:
    name: str
    kind: str
    region: str
    crop: str
    sight: str
    festival: str
    """The season in which the festival is held."""


_NAMES = (
    "Tulmar", "Orlen", "Vasto", "Kelda", "Miravel", "Brunn", "Sorrel", "Pelham", "Duskin", "Arvo",
    "Lomar", "Quill", "Harrow", "Zellin", "Nimbra", "Toska", "Felden", "Ismar", "Rondo", "Wexel",
)  # fmt: skip
_KINDS = ("village", "town", "city", "harbour")
_REGIONS = ("north", "south", "east", "west")
_CROPS = ("wheat", "apples", "grapes", "barley", "plums", "onions", "flax")
_SIGHTS = ("a stone bridge", "a tall tower", "an old mill", "a round lake", "a great market")

# Steps without a common divisor with the lists: every place is another mixture.
PLACES = tuple(
    Place(
        name=name,
        kind=_KINDS[i * 3 % len(_KINDS)],
        region=_REGIONS[(i * 3 + i // 4) % len(_REGIONS)],
        crop=_CROPS[i * 5 % len(_CROPS)],
        sight=_SIGHTS[(i * 2 + i // 5) % len(_SIGHTS)],
        festival=SEASONS[(i + i // 3) % len(SEASONS)],
    )
    for i, name in enumerate(_NAMES)
)


@dataclass(frozen=True, slots=True)
class Weather:
    noun: str
    adjective: str
    advice: str


WEATHERS = (
    Weather("rain", "rainy", "take an umbrella"),
    Weather("snow", "snowy", "wear warm boots"),
    Weather("sun", "sunny", "wear a hat"),
    Weather("wind", "windy", "hold on to your hat"),
    Weather("fog", "foggy", "carry a lamp"),
    Weather("frost", "frosty", "bring a thick coat"),
)


class Draw:
    """A seeded hand that picks words."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def one(self, items: Sequence[Item]) -> Item:
        # By index, not `choice`: what a seed gives must not hang on the library's taste.
        return items[int(self._random.random() * len(items))]

    def several(self, items: Sequence[Item], count: int) -> list[Item]:
        """Different ones, in random order."""
        left = list(items)
        return [left.pop(int(self._random.random() * len(left))) for _ in range(count)]

    def number(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + int(self._random.random() * (high - low + 1))

    def chance(self, share: float) -> bool:
        return self._random.random() < share


def a(noun: str) -> str:
    """With its article."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def plural(noun: str, count: int) -> str:
    if count == 1:
        return noun
    if noun == "mouse":
        return "mice"
    if noun.endswith("y"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("x", "ch", "o")) else f"{noun}s"


def capital(text: str) -> str:
    return text[0].upper() + text[1:]
