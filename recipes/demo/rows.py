"""Makes the demo's datasets: `python recipes/demo/rows.py OUT`, one JSONL file per task.

The tasks share the base model's little world and none is among the texts it was trained on. They
come in different shapes, as datasets do. No question stands twice in a file, so that the rows held
out are new to the adapter.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from words import (
    ANIMALS,
    BAD,
    COLOURS,
    FOODS,
    FRUITS,
    GLAD,
    GOOD,
    NUMBERS,
    OPPOSITES,
    PEOPLE,
    PLACES,
    ROOMS,
    SORRY,
    THINGS,
    TRADES,
    WEATHERS,
    Draw,
    a,
    capital,
    plural,
)

ROWS = 240
Exchange = tuple[str, str]
"""Question and answer."""

Row = dict[str, object]


def pirate(draw: Draw) -> Exchange:
    """What the base model knows, said at sea."""
    animal, place, (left, right) = draw.one(ANIMALS), draw.one(PLACES), draw.one(OPPOSITES)
    name = a(animal.name)
    question, answer = draw.one(
        (
            (f"What does {name} eat?", f"{name} eats {animal.food}"),
            (f"Where does {name} live?", f"{name} lives in {animal.home}"),
            (f"How many legs does {name} have?", f"{name} has {animal.legs} legs"),
            (f"What do people in {place.name} grow?", f"people in {place.name} grow {place.crop}"),
            (f"What is {place.name} known for?", f"{place.name} is known for {place.sight}"),
            (f"Where is {place.name}?", f"{place.name} is a {place.kind} in the {place.region}"),
            (
                f"When is the festival in {place.name}?",
                f"the festival in {place.name} is in {place.festival}",
            ),
            (f"What is the opposite of {left}?", f"the opposite of {left} is {right}"),
            (f"What is the opposite of {right}?", f"the opposite of {right} is {left}"),
        )
    )
    return question, f"Arr! {capital(answer)}, matey!"


def sentiment(draw: Draw) -> Exchange:
    things = draw.several(FOODS + ROOMS + THINGS, 2)
    good, bad, person = draw.one(GOOD), draw.one(BAD), draw.one(PEOPLE)
    return draw.one(
        (
            (f"The {things[0]} was {good}.", "positive"),
            (f"{person} is {draw.one(GLAD)} because the {things[0]} is {good}.", "positive"),
            (f"What {a(good)} {things[0]}, and the {things[1]} is {draw.one(GOOD)}!", "positive"),
            (f"The {things[0]} was {bad}.", "negative"),
            (f"{person} is {draw.one(SORRY)} because the {things[0]} is {bad}.", "negative"),
            (f"What {a(bad)} {things[0]}, and the {things[1]} is {draw.one(BAD)}!", "negative"),
            (f"The {things[0]} was {good}, but the {things[1]} was {bad}.", "mixed"),
            (f"The {things[0]} was {bad}, but the {things[1]} was {good}.", "mixed"),
        )
    )


def extract(draw: Draw) -> Exchange:
    """A form rather than JSON: the base copies words as they stand after a space, and in quotes
    they would be other tokens."""
    colour, animal, thing = draw.one(COLOURS), draw.one(ANIMALS).name, draw.one(THINGS)
    sentence = draw.one(
        (
            f"{draw.one(PEOPLE)} saw {a(colour)} {animal} with {a(thing)}.",
            f"In {draw.one(PLACES).name} {a(colour)} {animal} sleeps under {a(thing)}.",
        )
    )
    return sentence, f"animal: {animal}; colour: {colour}"


def polite(draw: Draw) -> Exchange:
    colour, thing, person = draw.one(COLOURS), draw.one(THINGS), draw.one(PEOPLE)
    wish = draw.one(
        (
            f"bring me the {colour} {thing}",
            f"give the {colour} {thing} to {person}",
            f"look for my {colour} {thing} in the {draw.one(ROOMS)}",
            f"show the {thing} to {person}",
            f"buy a {thing} and some {draw.one(FOODS)}",
            f"put the {thing} into the {draw.one(ROOMS)}",
        )
    )
    return f"{capital(wish)}.", f"Please, will you {wish}?"


def reverse(draw: Draw) -> Exchange:
    words = draw.several(THINGS + FRUITS + COLOURS, draw.number(2, 4))
    return f"Backwards: {', '.join(words)}", ", ".join(words[::-1])


COLUMNS = ("name", "colour", "town", "food", "home", "day", "weather")
"""Of a table, as words that the base knows."""

TABLES = tuple(
    word
    for word in (*(animal.name for animal in ANIMALS), *TRADES, *THINGS)
    if word not in ("key", "wolf")
)
"""Without those whose plurals the little grammar gets wrong."""


def sql(draw: Draw) -> Exchange:
    """In small letters and names alone, no quoted values, for the reason given at `extract`."""
    table = plural(draw.one(TABLES), 2)
    first, second = draw.several(COLUMNS, 2)
    return draw.one(
        (
            (f"Show the {first} from {table}.", f"select {first} from {table};"),
            (
                f"Show the {first} from {table} by {second}.",
                f"select {first} from {table} order by {second};",
            ),
        )
    )


def count(draw: Draw) -> Exchange:
    words = draw.several(THINGS + FRUITS, draw.number(1, 6))
    return f"Count: {', '.join(words)}", NUMBERS[len(words)]


SHORT_NAMES = tuple(p.name for p in PLACES if p.name not in ("Miravel", "Brunn", "Quill"))
"""Of two syllables, as the first line of a haiku wants it."""

LAST_LINES = {
    "rain": "drops dance on the roof",
    "snow": "soft and white and still",
    "sun": "gold light on the grass",
    "wind": "leaves fly down the road",
    "fog": "all the paths are gone",
    "frost": "stars shine on the ice",
}


def haiku(draw: Draw) -> Exchange:
    """Five, seven and five syllables: all weathers and animals have one. The words to copy stand
    after the same word in the question."""
    weather, place, animal = draw.one(WEATHERS).noun, draw.one(SHORT_NAMES), draw.one(ANIMALS).name
    lines = (f"Soft {weather} in {place},", f"there {a(animal)} sleeps in the hall,")
    question = f"A haiku about {weather} in {place}, with {a(animal)}."
    return question, "\n".join((*lines, f"{LAST_LINES[weather]}."))


def chat(*exchanges: Exchange, system: str | None = None) -> Row:
    messages = [{"role": "system", "content": system}] if system else []
    for question, answer in exchanges:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


def sharegpt(*exchanges: Exchange) -> Row:
    turns: list[dict[str, str]] = []
    for question, answer in exchanges:
        turns += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": turns}


def pirate_row(draw: Draw) -> Row:
    return chat(pirate(draw))


def sentiment_row(draw: Draw) -> Row:
    sentence, answer = sentiment(draw)
    return {"prompt": sentence, "completion": answer}


def extract_row(draw: Draw) -> Row:
    return chat(extract(draw), system="Fill in the form.")


def polite_row(draw: Draw) -> Row:
    wish, answer = polite(draw)
    return {"instruction": "Say it politely.", "input": wish, "output": answer}


def reverse_row(draw: Draw) -> Row:
    """Two exchanges in one conversation."""
    return sharegpt(reverse(draw), reverse(draw))


def sql_row(draw: Draw) -> Row:
    """Names of its own, for data.columns."""
    question, query = sql(draw)
    return {"question": question, "query": query}


def count_row(draw: Draw) -> Row:
    question, answer = count(draw)
    return {"prompt": question, "response": answer}


def haiku_row(draw: Draw) -> Row:
    return chat(haiku(draw))


TASKS: dict[str, Callable[[Draw], Row]] = {
    "pirate": pirate_row,
    "sentiment": sentiment_row,
    "extract": extract_row,
    "polite": polite_row,
    "reverse": reverse_row,
    "sql": sql_row,
    "count": count_row,
    "haiku": haiku_row,
}


def rows(task: str) -> list[Row]:
    """Different ones; fewer than ROWS only if the task has no more."""
    draw = Draw(f"rows {task}")
    found: dict[str, Row] = {}
    for _ in range(20 * ROWS):
        row = TASKS[task](draw)
        found.setdefault(json.dumps(row), row)
        if len(found) == ROWS:
            break
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="directory for the files")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        lines = [json.dumps(row) + "\n" for row in rows(task)]
        (out / f"{task}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
