"""Texts for the demo's base model, made by a seeded grammar: stories, facts, reports, recipes,
sums in words, letters, lists, and chats about all of them.

No demo task is among the chats: what they teach is to answer, to copy from what was asked, and to
stop.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from words import (
    ANIMALS,
    BAD,
    BOYS,
    COLOURS,
    DAYS,
    FOODS,
    FRUITS,
    GLAD,
    GOOD,
    NUMBERS,
    OPPOSITES,
    PEOPLE,
    PLACES,
    ROOMS,
    SEASONS,
    SIZES,
    SORRY,
    THINGS,
    TRADES,
    VEGETABLES,
    WEATHERS,
    Draw,
    a,
    capital,
    listed,
    plural,
)


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Chat:
    turns: tuple["Turn", ...]

    def messages(self) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in self.turns]


Document = Text | Chat
Turn = tuple[str, str]
"""Role and content."""

Exchange = tuple[str, str]
"""Question and answer."""


def documents(seed: int) -> Iterator[Document]:
    """Without end; the same seed gives the same documents."""
    draw = Draw(f"corpus {seed}")
    while True:
        if draw.chance(0.5):
            yield Text(with_articles(draw.one(TEXTS)(draw)))
        else:
            yield Chat(tuple((role, with_articles(text)) for role, text in chat(draw)))


def with_articles(text: str) -> str:
    """The grammar says `a` before a word it does not know yet."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def he(person: str) -> str:
    return "he" if person in BOYS else "she"


def his(person: str) -> str:
    return "his" if person in BOYS else "her"


def story(draw: Draw) -> str:
    """Somebody loses or finds something, meets somebody, and it ends well."""
    hero, friend = draw.several(PEOPLE, 2)
    place, trade = draw.one(PLACES), draw.one(TRADES)
    colour, thing, room = draw.one(COLOURS), draw.one(THINGS), draw.one(ROOMS)
    animal, weather, day = draw.one(ANIMALS), draw.one(WEATHERS), draw.one(DAYS)
    start = draw.one(
        (
            f"Once there was a {trade} called {hero} who lived in {place.name}.",
            f"{hero} was {a(trade)} in the {place.kind} of {place.name}.",
            f"In {place.name} there lived {a(trade)} named {hero}.",
        )
    )
    loss = draw.one(
        (
            f"On {day} {he(hero)} lost {his(hero)} {colour} {thing} in the {room}.",
            f"One {weather.adjective} day {hero} could not find {his(hero)} {colour} {thing}.",
            f"On {day} somebody took the {colour} {thing} of {hero}.",
        )
    )
    mood = f"{hero} was very {draw.one(SORRY)}."
    meeting = draw.one(
        (
            f"Then {he(hero)} met a {draw.one(SIZES)} {animal.name} from {animal.home}.",
            f"Near {place.sight} {he(hero)} saw a {draw.one(COLOURS)} {animal.name}.",
            f"{friend} came by with a {draw.one(SIZES)} {animal.name}.",
        )
    )
    talk = draw.one(
        (
            f'"Have you seen my {thing}?" asked {hero}. The {animal.name} pointed to the {room}.',
            f'"Where is my {thing}?" asked {hero}. "Look in the {room}," said {friend}.',
            f"The {animal.name} {animal.call} because it wanted {animal.food}.",
        )
    )
    end = draw.one(
        (
            f"There was the {colour} {thing}, and {hero} was {draw.one(GLAD)} again.",
            f"They found the {thing} under a {draw.one(THINGS)}. How {draw.one(GLAD)} they were!",
            f"So {hero} got the {thing} back and gave the {animal.name} some {animal.food}.",
        )
    )
    last = draw.one(
        (
            f"In the evening {hero} and {friend} ate {draw.one(FOODS)} and {draw.one(FOODS)}.",
            f"From that day on {hero} and the {animal.name} were friends.",
            f"It had been a {draw.one(GOOD)} day.",
        )
    )
    return " ".join((start, loss, mood, meeting, talk, end, last))


def place_facts(draw: Draw) -> str:
    place = draw.one(PLACES)
    facts = [
        f"People there grow {place.crop}.",
        f"It is known for {place.sight}.",
        f"Its festival is held in {place.festival}.",
        f"Many {plural(draw.one(TRADES), 2)} live there.",
        f"A {draw.one(TRADES)} named {draw.one(PEOPLE)} was born in {place.name}.",
    ]
    chosen = draw.several(facts, draw.number(2, 4))
    return " ".join((f"{place.name} is a {place.kind} in the {place.region}.", *chosen))


def animal_facts(draw: Draw) -> str:
    sentences: list[str] = []
    for animal in draw.several(ANIMALS, draw.number(1, 3)):
        facts = [
            f"The {animal.name} has {animal.legs} legs.",
            f"The {animal.name} eats {animal.food}.",
            f"The {animal.name} lives in {animal.home}.",
            f"The {animal.name} {animal.call}.",
        ]
        sentences += draw.several(facts, draw.number(2, 4))
    return " ".join(sentences)


def weather_report(draw: Draw) -> str:
    place, (now, later) = draw.one(PLACES), draw.several(WEATHERS, 2)
    day, degrees = draw.number(0, 6), draw.number(1, 20)
    return " ".join(
        (
            f"Weather in {place.name} for {DAYS[day]}:",
            f"it will be {now.adjective} with {NUMBERS[degrees]} degrees.",
            f"Please {now.advice}.",
            f"On {DAYS[(day + 1) % 7]} there will be {later.noun} in the {place.region}, "
            f"so {later.advice}.",
        )
    )


def recipe(draw: Draw) -> str:
    fruit, vegetable = draw.one(FRUITS), draw.one(VEGETABLES)
    many, few = draw.number(2, 9), draw.number(1, 4)
    main, count, food = draw.one(((fruit, many, "cake"), (vegetable, many, "soup")))
    steps = [
        f"First wash the {plural(main, count)}.",
        f"Then cut them into {draw.one(('small', 'big', 'thin'))} pieces.",
        f"Add {NUMBERS[few]} {plural('cup', few)} of {draw.one(('milk', 'water', 'flour'))}.",
        f"Cook it for {NUMBERS[draw.number(5, 20)]} minutes.",
        f"Serve it with {draw.one(FOODS)}.",
    ]
    return " ".join(
        (f"{capital(main)} {food}. Take {NUMBERS[count]} {plural(main, count)}.", *steps)
    )


def addition(draw: Draw) -> str:
    left, right = draw.number(0, 10), draw.number(0, 10)
    return f"{NUMBERS[left]} plus {NUMBERS[right]} is {NUMBERS[left + right]}"


def subtraction(draw: Draw) -> str:
    left = draw.number(0, 20)
    right = draw.number(0, left)
    return f"{NUMBERS[left]} minus {NUMBERS[right]} is {NUMBERS[left - right]}"


def sums(draw: Draw) -> str:
    lines = [draw.one((addition, subtraction))(draw) for _ in range(draw.number(2, 5))]
    return " ".join(f"{capital(line)}." for line in lines)


def letter(draw: Draw) -> str:
    sender, receiver = draw.several(PEOPLE, 2)
    place, weather, animal = draw.one(PLACES), draw.one(WEATHERS), draw.one(ANIMALS)
    good = draw.chance(0.5)
    words, moods = (GOOD, GLAD) if good else (BAD, SORRY)
    thing = draw.one(THINGS)
    middle = draw.several(
        [
            f"The weather here is {weather.adjective}.",
            f"The {draw.one(FOODS)} is {draw.one(words)} and the people are {draw.one(words)}.",
            f"I have seen {place.sight}.",
            f"Yesterday a {draw.one(COLOURS)} {animal.name} ate my {draw.one(FOODS)}.",
            f"I bought a {draw.one(COLOURS)} {thing} for you.",
        ],
        draw.number(2, 4),
    )
    return " ".join(
        (
            f"Dear {receiver}, I am in {place.name} now and I am {draw.one(moods)}.",
            *middle,
            f"It is a {draw.one(words)} place. Yours, {sender}.",
        )
    )


def opinions(draw: Draw) -> str:
    """What is good makes people glad, what is bad does not."""
    sentences: list[str] = []
    for _ in range(draw.number(2, 4)):
        person, good = draw.one(PEOPLE), draw.chance(0.5)
        words, moods = (GOOD, GLAD) if good else (BAD, SORRY)
        subject = draw.one((draw.one(FOODS), draw.one(THINGS), draw.one(ROOMS)))
        sentences.append(
            draw.one(
                (
                    f"{person} was {draw.one(moods)} because the {subject} was {draw.one(words)}.",
                    f"The {subject} was {draw.one(words)}, so {person} was {draw.one(moods)}.",
                    f"{person} thinks that the {subject} is {draw.one(words)} and "
                    f"{'liked' if good else 'hated'} it.",
                )
            )
        )
    return " ".join(sentences)


def counting(draw: Draw) -> str:
    start = draw.number(0, 12)
    length = draw.number(4, 8)
    numbers = list(NUMBERS[start : start + length])
    return f"Counting {draw.one(('up', 'aloud'))}: {', '.join(numbers)}."


def counting_down(draw: Draw) -> str:
    start = draw.number(4, 20)
    numbers = [NUMBERS[n] for n in range(start, max(start - 8, -1), -1)]
    return f"Counting down: {', '.join(numbers)}."


def days_and_seasons(draw: Draw) -> str:
    words = draw.one((DAYS, SEASONS))
    start = draw.number(0, len(words) - 1)
    turned = (words * 3)[start : start + draw.number(3, 6)]
    return f"{capital(turned[0])} is followed by " + ", then by ".join(turned[1:]) + "."


def opposites(draw: Draw) -> str:
    pairs = draw.several(OPPOSITES, draw.number(2, 4))
    return " ".join(f"The opposite of {left} is {right}." for left, right in pairs)


def card(draw: Draw) -> str:
    """A record, with the punctuation that data has."""
    person, place = draw.one(PEOPLE), draw.one(PLACES)
    fields = [
        f"name: {person}",
        f"town: {place.name}",
        f"trade: {draw.one(TRADES)}",
        f"animal: {draw.one(ANIMALS).name}",
        f"colour: {draw.one(COLOURS)}",
    ]
    quoted = [
        '"{}": "{}"'.format(*field.split(": ")) for field in draw.several(fields, draw.number(2, 4))
    ]
    return f"{{{', '.join(quoted)}}}" if draw.chance(0.5) else "; ".join(fields)


def shopping(draw: Draw) -> str:
    shopper = draw.one(PEOPLE)
    goods: list[str] = []
    for noun in draw.several(FRUITS + VEGETABLES + THINGS, draw.number(2, 4)):
        count = draw.number(1, 9)
        goods.append(f"{NUMBERS[count]} {plural(noun, count)}")
    return (
        f"{shopper} goes to the market in {draw.one(PLACES).name} and buys {listed(goods)}. "
        f"At home {he(shopper)} puts the {goods[0].split(' ')[1]} into {a(draw.one(THINGS))}."
    )


def echo(draw: Draw) -> str:
    """Words without any sense, said again: nothing helps here but to look back."""
    words = draw.several(ALL_WORDS, draw.number(3, 12))
    line = " ".join(words)
    return f"Say: {line}. " + " ".join(f"Again: {line}." for _ in range(draw.number(1, 2)))


ALL_WORDS = (
    PEOPLE
    + COLOURS
    + THINGS
    + FRUITS
    + VEGETABLES
    + FOODS
    + TRADES
    + NUMBERS
    + DAYS
    + tuple(item.name for items in (ANIMALS, PLACES) for item in items)
)

TEXTS: tuple[Callable[[Draw], str], ...] = (
    story, story, story, place_facts, animal_facts, weather_report, recipe, sums, letter, opinions,
    counting, counting_down, days_and_seasons, opposites, card, shopping,
    echo, echo, echo, echo,
)  # fmt: skip


def chat(draw: Draw) -> list[Turn]:
    """One to three questions with their answers, sometimes under a system message."""
    turns: list[Turn] = []
    if draw.chance(0.2):
        turns.append(("system", draw.one(SYSTEMS)))
    for _ in range(draw.one((1, 1, 1, 2, 3))):
        question, answer = draw.one(EXCHANGES)(draw)
        turns += [("user", question), ("assistant", answer)]
    return turns


SYSTEMS = (
    "You are a helpful assistant.",
    "Answer in one sentence.",
    "You know all about animals and places.",
    "Be short.",
)


def ask_place(draw: Draw) -> Exchange:
    place = draw.one(PLACES)
    return draw.one(
        (
            (f"What do people in {place.name} grow?", f"People in {place.name} grow {place.crop}."),
            (f"Where is {place.name}?", f"{place.name} is a {place.kind} in the {place.region}."),
            (f"What is {place.name} known for?", f"{place.name} is known for {place.sight}."),
            (
                f"When is the festival in {place.name}?",
                f"The festival in {place.name} is in {place.festival}.",
            ),
        )
    )


def ask_animal(draw: Draw) -> Exchange:
    animal = draw.one(ANIMALS)
    name = animal.name
    return draw.one(
        (
            (f"How many legs does {a(name)} have?", f"{capital(a(name))} has {animal.legs} legs."),
            (f"What does {a(name)} eat?", f"{capital(a(name))} eats {animal.food}."),
            (f"Where does {a(name)} live?", f"{capital(a(name))} lives in {animal.home}."),
            (f"What sound does {a(name)} make?", f"{capital(a(name))} {animal.call}."),
        )
    )


def ask_sum(draw: Draw) -> Exchange:
    line = draw.one((addition, subtraction))(draw)
    question, _ = line.split(" is ")
    return f"What is {question}?", f"{capital(line)}."


def ask_text(draw: Draw) -> Exchange:
    """A few sentences, and a question that only they can answer."""
    people = draw.several(PEOPLE, 3)
    things = draw.several(THINGS, 3)
    colours = draw.several(COLOURS, 3)
    places = draw.several(PLACES, 3)
    facts = [
        draw.one(
            (
                f"{person} has a {colour} {thing} in {place.name}.",
                f"In {place.name} {person} has a {colour} {thing}.",
                f"There is a {colour} {thing} in {place.name}. It belongs to {person}.",
            )
        )
        for person, thing, colour, place in zip(people, things, colours, places, strict=True)
    ]
    count = draw.number(1, 3)
    asked = draw.number(0, count - 1)
    person, thing, colour, place = people[asked], things[asked], colours[asked], places[asked]
    question, answer = draw.one(
        (
            (f"Who has the {thing}?", f"{person} has the {thing}."),
            (f"What colour is the {thing}?", f"The {thing} is {colour}."),
            (f"Where is the {thing}?", f"The {thing} is in {place.name}."),
            (f"What does {person} have?", f"{person} has a {colour} {thing}."),
        )
    )
    return f"{' '.join(facts[:count])} {question}", answer


def ask_list(draw: Draw) -> Exchange:
    """Words to be handed back in one way or another."""
    words = draw.several(THINGS + FRUITS + COLOURS, draw.number(2, 5))
    line = ", ".join(words)
    return draw.one(
        (
            (f"Repeat after me: {line}", line),
            (f"What is the first word of this list? {line}", words[0]),
            (f"What is the last word of this list? {line}", words[-1]),
            (f"What comes after {words[0]}? {line}", words[1]),
            (f"What comes before {words[1]}? {line}", words[0]),
            (f"Write one word on each line: {line}", "\n".join(words)),
            (f"Is there a {words[1]} in this list? {line}", "Yes."),
        )
    )


def ask_opposite(draw: Draw) -> Exchange:
    pair = draw.one(OPPOSITES)
    left, right = pair if draw.chance(0.5) else pair[::-1]
    return f"What is the opposite of {left}?", f"The opposite of {left} is {right}."


def ask_next(draw: Draw) -> Exchange:
    words = draw.one((DAYS, SEASONS))
    i = draw.number(0, len(words) - 1)
    word, after = words[i], words[(i + 1) % len(words)]
    return f"What comes after {word}?", f"After {word} comes {after}."


def ask_weather(draw: Draw) -> Exchange:
    place, weather, day = draw.one(PLACES), draw.one(WEATHERS), draw.one(DAYS)
    return draw.one(
        (
            (f"It is {weather.adjective} in {place.name}. What should I do?",
             f"You should {weather.advice}."),
            (f"There will be {weather.noun} in {place.name} on {day}. How will the day be?",
             f"{day} will be {weather.adjective} in {place.name}."),
        )
    )  # fmt: skip


def ask_story(draw: Draw) -> Exchange:
    thing = draw.one((draw.one(ANIMALS).name, draw.one(THINGS)))
    person = draw.one(PEOPLE)
    place, colour = draw.one(PLACES), draw.one(COLOURS)
    return (
        f"Tell me about {person} and a {colour} {thing}.",
        f"{person} lived in {place.name} and had a {colour} {thing}. "
        f"One day the {thing} was gone. {person} was {draw.one(SORRY)}. "
        f"But then the {thing} was there again, and {person} was {draw.one(GLAD)}.",
    )


def greet(draw: Draw) -> Exchange:
    person = draw.one(PEOPLE)
    return draw.one(
        (
            (f"Hello, I am {person}.", f"Hello {person}, nice to meet you."),
            (f"My name is {person}. What is my name?", f"Your name is {person}."),
            ("How are you?", f"I am {draw.one(GLAD)}, thank you."),
            (f"Good morning from {(place := draw.one(PLACES)).name}!",
             f"Good morning to {place.name}!"),
        )
    )  # fmt: skip


def want(draw: Draw) -> Exchange:
    colour, thing, person = draw.one(COLOURS), draw.one(THINGS), draw.one(PEOPLE)
    return draw.one(
        (
            (f"Bring me the {colour} {thing}.", f"Here is the {colour} {thing}."),
            (
                f"Give the {colour} {thing} to {person}.",
                f"I gave the {colour} {thing} to {person}.",
            ),
            (f"Can you open the {thing}?", f"Yes, I can open the {thing}."),
            (f"Please look for my {thing}.", f"I will look for your {thing}."),
        )
    )


EXCHANGES: tuple[Callable[[Draw], Exchange], ...] = (
    ask_place, ask_animal, ask_sum, ask_text, ask_text, ask_list, ask_list, ask_opposite, ask_next,
    ask_weather, ask_story, greet, want,
)  # fmt: skip
