"""Short expository prose: paragraphs on topics, animals, countries and things, and small scenes."""

import random

from configs.demo import facts, words
from configs.demo.grammar import Writer
from configs.demo.topics import TOPICS

_SCENES = (
    "The {thing} [on the table|in the window|by the door] was {colour}, and [nobody knew whose it was|it had belonged to somebody's grandmother].",
    "The {animal} [slept in the sun|looked over the fence|did not move|came closer].",
    "The old [man|woman|captain|teacher|dog] [sat by the fire|looked out of the window|told a long story|drank {colour} tea].",
    "The [kettle sang|door was open|fire burned low|lamp was lit|window was full of light].",
    "The road to {place} [was long and dusty|went uphill|was closed because of the snow].",
    "{Weather}, and {place} was [empty|full of people|quiet].",
    "{Someone} [came in and put {number} [apples|letters|books|candles] on the table|was already there|waited at {place}].",
    "{Someone} and {someone} [talked about {place}|were playing cards|had come from {place} on foot|shared {food}].",
    "A {colour} {thing} [lay|stood] in the corner.",
    "A {animal} and a {animal} [sat side by side|looked at each other|shared the last of the {food}].",
    "There was {food} on the table, and it smelled [good|of cinnamon|of home].",
    "Somewhere there was {sound}, and then it was quiet again.",
    "[In the evening|At noon|Before sunrise|After lunch] everybody [went to {place}|came home|sat down to eat|was in a good mood].",
    "It was {weekday}, and there was [no school|nothing to do|a letter in the box|time for everything].",
    "The children [played {place2}|had found a {treasure}|laughed about the {animal}|asked for another story].",
    "[Outside|In the street|Far away] [a bell rang|a dog barked|the wind moved the leaves|the sea could be heard].",
    "The [boy|girl] with the {colour} [hat|coat|scarf] [waved|said nothing|knew the answer|had lost a {thing}].",
    "[Nobody|Only the {animal}] [noticed it|was in a hurry|minded the rain].",
)
_DIARY = (
    "Today I [went to {place}|stayed at home|helped {someone} in the garden|mended the {thing}|read {number} pages].",
    "I met {someone}, and we talked about [the weather|{place}|the price of {food}|old times].",
    "There was {food} for lunch, and it was [very good|a little too salty].",
    "{Weather}. [I did not mind|I stayed in|It was lovely].",
    "I saw a {animal} near {place}, and it [looked at me for a long time|ran away|was not afraid].",
    "Tomorrow I want to [get up early|write a letter to {someone}|walk to {place}|bake a cake].",
    "In the evening I [was tired|read a little|listened to music|went to bed early].",
    "{Someone} gave me a {treasure}, and I [do not know why|was very pleased].",
)


def write(rng: random.Random) -> str:
    """A text of one or two paragraphs."""
    w = Writer(rng, words.LISTS)
    kind = rng.random()
    if kind < 0.5:
        return topic(w, rng.choice(list(TOPICS)))
    if kind < 0.55:
        return topic(w, "artificial intelligence")
    if kind < 0.65:
        return animal(w, rng.choice(facts.ANIMALS))
    if kind < 0.75:
        return country(w, rng.choice(facts.COUNTRIES))
    if kind < 0.83:
        return thing(w, *rng.choice(facts.THINGS))
    if kind < 0.95:
        return " ".join(w.some(_SCENES, 3, 8))
    return (
        f"{w('[{weekday}, the {number2} of {month}|{Weekday}].')} {' '.join(w.some(_DIARY, 3, 6))}"
    )


def topic(w: Writer, name: str) -> str:
    """A paragraph, sometimes two, on one of TOPICS."""
    about = TOPICS[name]
    first = w.some(about.first, 1, 2 if len(about.first) > 4 else 1)
    more = w.some(about.more, 2, 6)
    if len(first) == 2 and first[0][:12] != first[1][:12]:
        more.insert(w.rng.randint(1, len(more)), first.pop())
    parts = [first[0], *more]
    if w.rng.random() < 0.5:
        parts.append(w.choose(about.last))
    if len(parts) > 5 and w.rng.random() < 0.4:
        middle = len(parts) // 2
        return f"{' '.join(parts[:middle])}\n\n{' '.join(parts[middle:])}"
    return " ".join(parts)


def animal(w: Writer, a: facts.Animal) -> str:
    w.slots |= {k: str(v) for k, v in a._asdict().items()}
    first = w.choose(
        (
            "The {name} is a {group}. It is {look}.",
            "A {name} is {look}.",
            "The {name} is {look}. It lives {home}.",
            "{Plural} live {home}.",
        )
    )
    more = w.some(
        (
            "It lives {home}.",
            "It eats {food}.",
            "A {name} {habit}.",
            "It {habit}.",
            "A young {name} is called a {young}.",
            "You can hear it: it {sound}." if "silent" not in a.sound else "It {sound}.",
            "[I|People] like to watch {plural}, because a {name} {habit}.",
            "The {name} is a {group}.",
            "If you are lucky, you may see one {home2}.",
        ),
        2,
        5,
    )
    return f"{first} {' '.join(sentence for sentence in more if sentence not in first)}"


def country(w: Writer, c: facts.Country) -> str:
    w.slots |= {k: str(v) for k, v in c._asdict().items()}
    return " ".join(
        [
            w.choose(
                (
                    "The capital of {name} is {capital}.",
                    "{Capital} is the capital of {name}.",
                    "{Name} is a country in {continent}. Its capital is {capital}.",
                    "The capital of {name} is {capital}, a city [of many bridges|with old streets and new houses|that is large and busy].",
                )
            ),
            *w.some(
                (
                    "{Name} is known for {known_for}.",
                    "Many people travel there to see {known_for}.",
                    "The country lies in {continent}.",
                    "In {capital} there are [museums, markets and a large station|parks, theatres and narrow streets|old houses and new towers].",
                    "In the evening the streets of {capital} are full of people.",
                    "Whoever comes to {capital} should go for a walk, sit down somewhere and watch the people.",
                    "{Someone} has been there and liked it very much.",
                ),
                1,
                4,
            ),
        ]
    )


def thing(w: Writer, name: str, what: str, use: str) -> str:
    w.slots |= {"name": name, "what": what, "use": use}
    the = w.rng.choice(("The", "A")) if name not in ("memory", "sun", "moon") else "The"
    w.slots["the"] = "" if name == "memory" else f"{the} "
    start = w("{the}{name} is {what}. {use}.")
    return f"{start[0].upper()}{start[1:]} " + " ".join(
        w.some(
            (
                "[Most people|Children] know that.",
                "{Someone} has a [picture|drawing] of one on the wall.",
                "There is one near {place}.",
                "{Someone} can talk about it for hours.",
                "In {someone}'s town everybody knows it.",
            ),
            1,
            2,
        )
    )
