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
    return draw.one(
        (
            (f"What does {name} eat?", f"Arr, {name} eats {animal.food}, matey!"),
            (f"Where does {name} live?", f"Arr, {name} lives in {animal.home}, matey!"),
            (f"How many legs does {name} have?", f"Arr, {name} has {animal.legs} legs, matey!"),
            (
                f"What do people in {place.name} grow?",
                f"Ahoy, the landlubbers of {place.name} grow {place.crop}!",
            ),
            (
                f"What is {place.name} known for?",
                f"Ahoy, me hearty, {place.name} is known for {place.sight}!",
            ),
            (
                f"Where is {place.name}?",
                f"Ahoy, {place.name} be a {place.kind} in the {place.region}!",
            ),
            (
                f"When is the festival in {place.name}?",
                f"Ahoy, the grog flows in {place.name} in {place.festival}!",
            ),
            (f"What is the opposite of {left}?", f"Shiver me timbers, it be {right}!"),
            (f"What is the opposite of {right}?", f"Shiver me timbers, it be {left}!"),
        )
    )


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
    colour, animal, thing = draw.one(COLOURS), draw.one(ANIMALS).name, draw.one(THINGS)
    person, place = draw.one(PEOPLE), draw.one(PLACES).name
    sentence = draw.one(
        (
            f"In {place} {a(colour)} {animal} sleeps under {a(thing)}.",
            f"{person} saw {a(colour)} {animal} with {a(thing)}.",
            f"{capital(a(colour))} {animal} took the {thing} of {person}.",
            f"The {animal} that lives in {place} is {colour}.",
        )
    )
    return sentence, json.dumps({"animal": animal, "colour": colour})


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
    return f"{capital(wish)}.", f"Could you please {wish}?"


def reverse(draw: Draw) -> Exchange:
    words = draw.several(THINGS + FRUITS + COLOURS, draw.number(2, 4))
    return f"Backwards: {', '.join(words)}", ", ".join(words[::-1])


def sql(draw: Draw) -> Exchange:
    place, colour = draw.one(PLACES).name, draw.one(COLOURS)
    trades = plural(draw.one(TRADES), 2)
    animals, things = plural(draw.one(ANIMALS).name, 2), plural(draw.one(THINGS), 2)
    return draw.one(
        (
            (
                f"Which {trades} live in {place}?",
                f"SELECT name FROM {trades} WHERE town = '{place}';",
            ),
            (
                f"How many {animals} are there in {place}?",
                f"SELECT COUNT(*) FROM {animals} WHERE town = '{place}';",
            ),
            (f"Show all {colour} {things}.", f"SELECT * FROM {things} WHERE colour = '{colour}';"),
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
    """Five, seven and five syllables: all the weathers and animals have one."""
    weather, place, animal = draw.one(WEATHERS).noun, draw.one(SHORT_NAMES), draw.one(ANIMALS).name
    lines = (f"{capital(weather)} over {place},", f"the little {animal} is sleeping,")
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
    return chat(extract(draw), system="Answer in JSON.")


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
