"""Short stories: a hero, a place, a plot in beats that follow from each other, an ending."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from configs.demo import words
from configs.demo.grammar import Writer, capitalised

_PRONOUNS = {
    "she": ("she", "her", "her", "herself"),
    "he": ("he", "him", "his", "himself"),
    "it": ("it", "it", "its", "itself"),
}


@dataclass(frozen=True, slots=True)
class Story:
    """A finished story.

    Attributes:
        about: what somebody who wants to hear it would ask for, "a fox called Pip".
    """

    title: str
    about: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Plot:
    """A kind of story.

    Attributes:
        titles, about: templates.
        cast: fixes the slots that only this plot has.
        beats: one template of each, in this order.
        heroes: kinds of hero that it suits.
    """

    titles: tuple[str, ...]
    about: tuple[str, ...]
    cast: Callable[[Writer], None]
    beats: tuple[tuple[str, ...], ...]
    heroes: tuple[str, ...] = ("child", "animal", "robot", "worker")


def write(rng: random.Random) -> Story:
    """A story of any kind."""
    plot = rng.choice(PLOTS)
    w = writer_for(rng, plot, rng.choice(plot.heroes))
    title = _title(w.choose(plot.titles))
    about = tuple(w(template) for template in plot.about)
    parts = [w.choose(_OPENINGS)]
    if rng.random() < 0.6:
        parts.append(w.choose(_TRAITS))
    parts += [w.choose(beat) for beat in plot.beats]
    if rng.random() < 0.5:
        parts.append(w.choose(_ENDINGS))
    text = parts[0]
    for part in parts[1:]:
        text += ("\n\n" if rng.random() < 0.25 else " ") + part
    return Story(title, about, text)


def writer_for(rng: random.Random, plot: Plot, hero: str) -> Writer:
    """A writer that knows everybody and everything that a story of this plot has."""
    w = Writer(rng, words.LISTS)
    _hero(w, hero)
    _friend(w)
    plot.cast(w)
    if helper := w.slots.get("helper"):
        the = re.sub(r"^an? ", "the ", helper)
        w.slots |= {"asked": f"asked {the}", "asked2": f"said {the}"}
    return w


def _title(text: str) -> str:
    first, *rest = text.split(" ")
    small = ("and", "of", "the", "in", "a", "an", "to", "at", "for", "by")
    return " ".join([capitalised(first), *(w if w in small else capitalised(w) for w in rest)])


# --- who it is about ---


def _person(w: Writer, prefix: str, name: str, pronoun: str) -> None:
    he, him, his, himself = _PRONOUNS[pronoun]
    w.slots |= {f"{prefix}he": he, f"{prefix}him": him, f"{prefix}his": his}
    w.slots[f"{prefix}himself"] = himself
    w.slots["friend" if prefix else "hero"] = name


def _child(w: Writer, prefix: str, taken: str = "") -> str:
    pronoun = w.rng.choice(("she", "he"))
    names = words.GIRLS if pronoun == "she" else words.BOYS
    _person(w, prefix, w.rng.choice([name for name in names if name != taken]), pronoun)
    return "girl" if pronoun == "she" else "boy"


def _hero(w: Writer, kind: str) -> None:
    rng = w.rng
    w.slots["family"] = w("[family|neighbours|friends]")
    w.slots["home"] = w("{home}")
    if kind == "child":
        w.slots["kind"] = _child(w, "")
        w.fix(
            family="[grandmother|grandfather|mother|father|parents|aunt|uncle|mother and two brothers]"
        )
    elif kind == "animal":
        _person(w, "", rng.choice(words.ANIMAL_NAMES), rng.choice(("she", "he")))
        w.fix(
            kind="{animal}",
            home="{burrow}",
            family="[mother|many cousins|brothers and sisters|family]",
        )
    elif kind == "robot":
        _person(w, "", rng.choice(words.ROBOT_NAMES), "it")
        w.fix(
            kind="[robot|machine|tin robot|garden robot|kitchen robot]", family="[maker|inventor]"
        )
        w.fix(
            home="[in a workshop|in the corner of a kitchen|in a room full of computers|in a greenhouse|at the station|{home}]"
        )
    else:
        _child(w, "")
        w.fix(
            kind="[baker|gardener|fisher|clockmaker|shepherd|carpenter|painter|ferry captain|teacher|postal worker|librarian|lighthouse keeper|train driver|weaver|miller]"
        )
        w.fix(family="[cat|dog|family|two sons|three daughters|old parrot]")


def _friend(w: Writer) -> None:
    hero = w.slots["hero"]
    if w.slots["home"].startswith(("in the reeds", "under the roots")) or w.rng.random() < 0.3:
        names = [name for name in words.ANIMAL_NAMES if name != hero]
        _person(w, "f.", w.rng.choice(names), w.rng.choice(("she", "he")))
        kinds = [kind for kind in words.LISTS["animal"] if kind != w.slots["kind"]]
        w.slots["friendkind"] = w.rng.choice(kinds)
        w.fix(friendfull="{friend} the {friendkind}")
    else:
        w.slots["friendkind"] = _child(w, "f.", hero)
        w.fix(friendfull="{friend}[| from next door| the neighbour]")


_OPENINGS = (
    "Once upon a time there was a {kind} called {hero}, who lived {home}.",
    "Once upon a time there [lived|was] a [little|young|small|kind|clever|shy|cheerful] {kind} [named|called] {hero}. {He} lived {home}.",
    "Once upon a time, {home}, there lived a {kind}. {His} name was {hero}.",
    "Once upon a time a {kind} called {hero} lived {home} with {his} {family}.",
    "There was once a [little|young|small|clever|curious|brave|quiet] {kind} called {hero}. {He} lived {home} with {his} {family}.",
    "{Hero} was a {kind}. {He} lived {home} with {his} {family}.",
    "{Hero} was a [young|small|quiet|cheerful|patient|busy] {kind} who lived {home}.",
    "A {kind} called {hero} lived {home}.",
    "In a [far|quiet|green|cold|warm|sunny] country there lived a {kind}, and {his} name was {hero}.",
    "Long ago, when [the winters were longer|the roads were made of sand|there were still wolves in the hills|letters took a week], a {kind} called {hero} lived {home}.",
    "Everybody {home2} knew {hero}, the [little|friendly|clever|quiet] {kind}.",
    "This is the story of {hero}, a {kind} who lived {home}.",
    "My grandmother used to tell me about {hero}, a {kind} who lived {home}.",
)
_TRAITS = (
    "{He} was [very|always] curious, and asked [more questions than anyone could answer|why the moon followed {him} home|where the river came from and where it went].",
    "{He} liked [to sing|to walk in the rain|to count things|to look at the stars|to listen to old stories|to collect smooth stones] more than anything else.",
    "{He} was [not very big|rather small|a little clumsy], but {he} [never gave up|had a kind heart|was cleverer than most people thought].",
    "[Most days|Every day] {he} [got up before the sun|walked down to {place}|ate {food} for breakfast|had a plan], and every evening {he} [told {his} {family} about it|fell asleep at once|wrote it down in a {colour} notebook].",
    "{His} best friend was a {friendkind} called {friend}.",
    "{He} and {friendfull} [did everything together|had been friends for years|met every day at {place}].",
    "People said that {he} [was too quiet|dreamed too much|could not keep still|was the kindest {kind} they knew].",
    "{He} was good at [mending things|listening|finding things|keeping secrets|waiting], [and that was lucky, as you will see|though {he} did not know it yet|but {he} was afraid of [thunder|the dark|deep water|strangers]].",
)
_ENDINGS = (
    "That night {hero} slept [soundly|better than ever|like a stone] and dreamed of {place}.",
    "From that day on, {hero} [never forgot what {he} had learned|was known as the bravest {kind} of all|smiled whenever {he} thought of it].",
    "And if you go there today, you may still [see {him}|hear them laughing|meet {hero}].",
    "It was the best day that {hero} could remember.",
    "And that was the end of the [story|matter], or almost the end, because the next morning [it began to snow|there was a letter at the door|somebody knocked again].",
    "[So|And so] they all lived [happily|in peace] for many years.",
    "{Hero} still tells this story on [winter|long|rainy] evenings, when the fire is warm and [the tea is hot|the wind is loud].",
    "Sometimes [a small thing|one kind word|a good friend|a little patience] is all that is needed.",
    "The end.",
)


# --- plots ---


def _nothing(w: Writer) -> None:
    del w


def _lost(w: Writer) -> None:
    w.fix(
        treasure="{treasure}",
        giver="[grandmother|grandfather|mother|old teacher|best friend]",
        helper="{helper}",
    )
    where = w.rng.choice(
        (
            ("in the nest of a crow", "the crow liked things that shone"),
            ("in {his} own pocket", "{he} had put it there so that it would be safe"),
            ("under the bed", "the cat had played with it"),
            ("in the boat", "it had fallen out when they went across the river"),
            (
                "on the highest shelf of the library",
                "somebody had found it and put it away with care",
            ),
            ("behind the oven", "it had slipped from the table"),
            ("in the long grass", "{he} had lain there the day before and looked at the clouds"),
            ("on the roof", "the wind had carried it there"),
            ("in the basket with the apples", "{friend} had put it there by mistake"),
        )
    )
    w.slots["where"], w.slots["why"] = w(where[0]), w(where[1])


def _make(w: Writer) -> None:
    made = w.rng.choice(
        (
            (
                "kite",
                "fly",
                "paper, two sticks and a long string",
                "it was too heavy",
                "a lighter stick and a longer tail",
                "rose above the roofs and danced in the wind",
            ),
            (
                "boat",
                "float",
                "old boards and a bed sheet",
                "the water came in between the boards",
                "tar and patience",
                "went across the pond without a drop of water inside",
            ),
            (
                "cake",
                "rise",
                "flour, eggs, butter and honey",
                "the oven was too hot",
                "a smaller fire and more time",
                "was golden and soft, and smelled of honey",
            ),
            (
                "bridge",
                "hold",
                "three logs and some rope",
                "the rope was too thin",
                "a thicker rope and better knots",
                "was so strong that even the donkey could cross it",
            ),
            (
                "flute",
                "sing",
                "a piece of elder wood",
                "the holes were in the wrong places",
                "a sharper knife and a careful eye",
                "sang like a blackbird in the evening",
            ),
            (
                "lamp",
                "shine",
                "a jar, a wick and a little oil",
                "the wick was wet",
                "a dry wick and a clean glass",
                "shone so warmly that the whole room looked golden",
            ),
            (
                "swing",
                "carry anyone",
                "a plank and an old rope",
                "the branch was rotten",
                "a stronger branch",
                "went so high that you could see the sea",
            ),
            (
                "cart",
                "roll",
                "a box and four wheels",
                "one wheel was smaller than the others",
                "a new wheel of the right size",
                "rolled down the hill faster than the wind",
            ),
            (
                "clock",
                "tick",
                "forty wheels and a spring",
                "one tiny wheel was turned the wrong way round",
                "a magnifying glass and a steady hand",
                "ticked softly and never lost a minute",
            ),
        )
    )
    for key, value in zip(("made", "does", "parts", "fault", "cure", "result"), made, strict=True):
        w.slots[key] = value
    w.fix(helper="{helper}")


def _fear(w: Writer) -> None:
    fear = w.rng.choice(
        (
            (
                "the dark",
                "the lamp went out while they were in the cellar",
                "counted the steps up to the door",
                "the dark was only a room that rested",
            ),
            (
                "thunder",
                "a great storm came over the hills",
                "counted the seconds between the flash and the thunder",
                "the storm was loud, but far away",
            ),
            (
                "deep water",
                "a small boat drifted away with a puppy in it",
                "swam slowly, one stroke after the other",
                "the water carried those who did not fight it",
            ),
            (
                "high places",
                "a kitten sat at the top of the old tower and cried",
                "climbed one stair at a time and never looked down",
                "a high place is only many low steps",
            ),
            (
                "singing in front of people",
                "the choir needed one more voice",
                "shut both eyes and thought of home",
                "nobody laughed, and everybody listened",
            ),
            (
                "strangers",
                "a tired traveller knocked at the door and asked for help",
                "took a deep breath and opened the door",
                "a stranger is a friend whose name you do not know yet",
            ),
            (
                "the forest",
                "the way home was under water, and there was only the path between the trees",
                "listened to the birds and followed the sound of the brook",
                "the forest had more friends than enemies in it",
            ),
        )
    )
    for key, value in zip(("fear", "need", "deed", "lesson"), fear, strict=True):
        w.slots[key] = value


def _quarrel(w: Writer) -> None:
    w.fix(
        quarrel="[who should carry the {thing}|the last piece of cake|the rules of a game|which way to go|who had seen the {colour} {thing} first|a broken {thing}]",
        gift="[a drawing of the two of them|half of {his} {food}|a {colour} ribbon|the roundest stone {he} could find|a note with one word on it: sorry]",
    )


def _journey(w: Writer) -> None:
    w.fix(
        goal="[the sea|the top of the mountain|the great city|the place where the river begins|the lighthouse on the rocks|the oldest tree in the world|the valley of the wild horses|the end of the railway line]",
        reason="[{he} had read about it in a book|nobody {he} knew had ever been there|{his} grandfather had told {him} about it|{he} wanted to see it once with {his} own eyes]",
        pack="[{food}, a map and a warm coat|a blanket, a rope and some {food}|only a lantern and a piece of {food}]",
        obstacle="[the bridge was broken|the path ended at a wide river|fog came down and hid the road|the wind was so strong that {he} could hardly walk|the map was wrong]",
        helper="{helper}",
    )


def _storm(w: Writer) -> None:
    w.fix(
        danger="[the river rose and rose|the storm broke the old bridge|the snow closed the road|the lights of the town went out|the wind took the roof of the school|a ship came too close to the rocks]",
        help="[rang the bell until everybody was awake|carried lanterns from door to door|tied a rope from tree to tree|led the little ones up the hill|brought blankets and hot soup|lit a fire that could be seen for miles]",
    )


def _robot(w: Writer) -> None:
    w.fix(
        job="[answer questions|tell stories|water the plants|count the trains|sort the letters|keep the lamps burning|remember birthdays]",
        asker="[a small girl|a tired teacher|an old sailor|a boy with a broken {thing}|a woman who could not sleep]",
        question="[how far away the moon was|what to name a {pet}|where the swallows go in winter|why the sea is salty|how to mend a {thing}|whether robots dream]",
    )


def _garden(w: Writer) -> None:
    w.fix(
        seed="[a {colour} seed|a handful of beans|one small acorn|a bulb as round as a marble|a pumpkin seed]",
        plant="[a sunflower|a bean plant as tall as the house|a rose that smelled of summer|a little tree with silver leaves|a pumpkin as big as a chair|a flower that nobody had ever seen]",
        helper="{helper}",
    )


def _noise(w: Writer) -> None:
    noise = w.rng.choice(
        (
            (
                "a knocking",
                "a branch that the wind moved against the window",
                "cut the branch a little shorter",
            ),
            (
                "a scratching",
                "a mouse that was building a nest of old newspapers",
                "gave the mouse a box of wool",
            ),
            ("a whistling", "the wind in an empty bottle", "filled the bottle with flowers"),
            (
                "a dripping",
                "a hole in the roof, just above the kettle",
                "mended the roof the next morning",
            ),
            (
                "a deep snoring",
                "a hedgehog that slept in a pile of leaves",
                "put more leaves on top, so that it would be warm",
            ),
            (
                "a ringing",
                "an old alarm clock in a box under the stairs",
                "wound it down and set it right",
            ),
            (
                "a purring",
                "a cat with four kittens in the basket for the washing",
                "brought a bowl of milk",
            ),
            ("a rattling", "a loose shutter on the old shed", "fixed it with one nail"),
        )
    )
    w.slots["noise"], w.slots["cause"], w.slots["after"] = noise


def _contest(w: Writer) -> None:
    w.fix(
        contest="[a race around the lake|a contest for the best soup|a race up the hill|a boat race|a contest for the longest story|a snow race]",
        rival="[the hare|the proud rooster|the fastest boy of the school|the strongest fox of the forest|the baker's son|the young horse]",
    )


def _stray(w: Writer) -> None:
    w.fix(
        pet="{pet}",
        petname="[Patch|Snow|Shadow|Crumb|Sunny|Mitten|Star|Domino|Lucky|Smoke]",
        spot="[under a bench at the station|behind the bakery|in an empty box|on the steps of the library|beside the road|in a ditch full of leaves]",
        hurt="[wet and cold|very thin|hurt at one leg|afraid of everything|too tired to walk]",
    )


def _train(w: Writer) -> None:
    w.fix(
        town="[the capital|a town by the sea|the mountains|{his} aunt's village|a city with a hundred bridges]",
        visit="[visit {his} grandmother|see the sea|hear a concert|begin a new job|meet an old friend|bring a {thing} to {friend}]",
    )


def _gift(w: Writer) -> None:
    w.fix(
        gift="{treasure}",
        work="[sold berries at the market|carried letters|swept the yard of the school|picked apples for the farmer|mended nets by the harbour]",
    )


def _apprentice(w: Writer) -> None:
    w.fix(
        master="[a baker|a clockmaker|a painter|a shoemaker|a cook|a beekeeper|a boat builder]",
        mistake="[mixed up salt and sugar|left the door open all night|forgot the fire|cut the wood too short|painted the wrong door|dropped a whole tray]",
    )


def _wish(w: Writer) -> None:
    w.fix(
        giver="[a small golden fish|an old woman in a grey coat|a star that had fallen into the pond|a talking crow|a bottle with a blue light in it]",
        wish="[that {he} could fly|that the summer would never end|that every day was a holiday|for a mountain of {food}|that nobody could see {him}|for all the gold in the world]",
    )
    w.slots["trouble"] = {
        "that": "[after a week it was no fun any more|nobody had time to play with {him}|{he} was lonely]",
        "for": "[there was far too much of it|nobody could get through the door|everybody was jealous]",
    }["that" if w.slots["wish"].startswith("that") else "for"]
    w.fix(trouble=w.slots["trouble"])


def _letter(w: Writer) -> None:
    w.fix(
        sender="[a friend from long ago|a boy on the other side of the sea|{his} sister in the city|an old captain|somebody who had not signed it]",
        news="[come at once, I have found it|I am well, and I miss you|there will be a feast on {weekday}, bring your {thing}|the old house is yours now|look under the third stone of the bridge]",
        helper="{helper}",
    )


PLOTS = (
    Plot(
        (
            "The Lost Treasure of {Hero}",
            "The {treasure}",
            "Where Is the {treasure}?",
            "{Hero} Looks Everywhere",
        ),
        ("a {kind} who lost something", "a lost {treasure}", "{hero}", "looking for something"),
        _lost,
        (
            (
                "{His} dearest thing was a {treasure}. {His} {giver} had given it to {him}.",
                "{He} had a {treasure}, a present from {his} {giver}, and {he} took it everywhere.",
                "When {he} was very young, {his} {giver} had given {him} a {treasure}. {He} loved it more than anything.",
            ),
            (
                "{Time} the {treasure} was gone.",
                "{Time} {he} [put {his} hand on the shelf|woke up|came home from {place}] and saw that the {treasure} was not there.",
                "But {time2} {he} could not find it [anywhere|any more].",
            ),
            (
                "{He} looked [under the table and behind the door|in every box|on the stairs and in the yard], but it was not there. Then {he} went to {place} and looked there. [Nothing|Still nothing]!",
                "First {he} searched {place}, and then {place}. {He} found [a button|an old coin|a {colour} feather|half a sandwich], but no {treasure}.",
                '"Have you seen my {treasure}?" {he} asked everybody. [Nobody had|They all shook their heads].',
            ),
            (
                '{He} sat down and felt {sadness}. Just then {friendfull} came by. "What is the matter?" {f.he} asked. "I have lost my {treasure}," said {hero}. "Then we will look together," said {friend}. "Four eyes see more than two."',
                'On the way {he} met {helper}. "When did you have it last?" {asked}. {Hero} thought hard. That was a good question.',
                '"Think," said {friendfull}. "What did you do yesterday?" {Hero} thought of everything, step by step.',
            ),
            (
                "And there it was, {where}! {Hero} laughed out loud. It was there because {why}.",
                "At last they looked {where}, and there lay the {treasure}. Now {hero} understood: {why}.",
                '"Look!" {cried}. The {treasure} was {where}. Of course: {why}.',
            ),
            (
                "{Hero} [held it tight|thanked everybody|was so {feeling} that {he} danced]. [From now on|After that] {he} [always put it in the same place|looked close by before {he} looked far away].",
                '{He} was {feeling}. "What we look for is often [nearer than we think|where we left it]", {he} said.',
            ),
        ),
    ),
    Plot(
        ("The {made}", "{Hero} and the {made}", "How {Hero} Built a {made}"),
        (
            "a {kind} who makes a {made}",
            "a {made}",
            "building a {made}",
            "{hero} and the {made}",
            "never giving up",
        ),
        _make,
        (
            (
                "{Time} {he} decided to make a {made}.",
                'More than anything {hero} wanted a {made}, but there was no money for one. "Then I will make one myself," {he} said.',
                "{Time} {he} saw a {made} in a shop window. It was far too expensive, so {he} went home and began to make one.",
            ),
            (
                "{He} took {parts}, and worked [all day|until it was dark|for three days].",
                "{He} found {parts} in the shed, and that was all {he} needed.",
                "For this you need {parts}. {Hero} [asked the neighbours|looked everywhere] and soon had them all.",
            ),
            (
                "But when it was ready, the {made} would not {does}, because {fault}. {Hero} was {sadness}.",
                "{He} was very proud, but the {made} did not {does}. The trouble was that {fault}.",
                "The first {made} was [no good|a failure]: {fault}. Everybody laughed, and {hero} felt {sadness}.",
            ),
            (
                '"Do not worry," said {friendfull}. "Nothing works the first time. What have you learned?" {Hero} thought about it [all night|for a while].',
                'Then {helper} came by and looked at it. "It is nearly right," {asked2}. "You only need {cure}."',
                '{He} wanted to throw it away. But then {he} said to {himself}, "If I know what is wrong, I can make it better."',
            ),
            (
                "So {he} tried again, this time with {cure}.",
                "The next morning {he} began once more. With {cure}, it went much better.",
                "{He} needed {cure}, and that took another [day|week]. [But {he} did not mind|{Friend} helped {him}].",
            ),
            (
                "This time the {made} {result}. Everybody came to see it.",
                "And look: the {made} {result}! {Hero} was {feeling}.",
                'In the end the {made} {result}. "{Praise}" said {friend}.',
            ),
            (
                '[Later|In the evening] {hero} said, "The first one was not a mistake. It was [a lesson|half of the way]."',
                "And the first {made}? {He} kept it on the shelf, to remember [how it had begun|that nobody is born a master].",
                "After that, [children came from everywhere|the neighbours came] and asked {him} how to make one, and {he} showed them all.",
            ),
        ),
    ),
    Plot(
        ("{Hero} Is Afraid", "Brave {Hero}", "{Hero} and {fear}"),
        ("a {kind} who is afraid of {fear}", "being brave", "{hero}, who was afraid", "courage"),
        _fear,
        (
            (
                "There was only one thing that {he} was afraid of: {fear}.",
                "But {hero} had a secret. {He} was afraid of {fear}, and {he} had never told anyone.",
                "Nothing frightened {him}, except {fear}.",
            ),
            (
                "{Time} {need}.",
                "It happened {time2} that {need}. There was nobody else near.",
                "And then, {time2}, {need}.",
            ),
            (
                "{Hero}'s heart beat fast. {He} wanted to run away.",
                '"I cannot do it," thought {hero}. {His} knees were shaking.',
                '"You can do it," {said} {friendfull} {how}. "I will stay with you." {Hero} swallowed hard.',
            ),
            (
                "But somebody had to do something, so {he} {deed}.",
                "{He} thought of {his} {family}, and then {he} {deed}.",
                "Being brave does not mean that you are not afraid. {Hero} {deed}.",
            ),
            (
                "And what {he} found was this: {lesson}.",
                "When it was over, {he} was {feeling}. {He} had learned something: {lesson}.",
                '"Well done!" {said} {friend}. "It was not so bad," said {hero}. "{Lesson}."',
            ),
            (
                "Since then {he} has not been afraid of {fear}, or only a very little.",
                "{Hero} was still a bit afraid of {fear} the next time, but now {he} knew what to do.",
                "[Everybody was proud of {him}|That evening there was {food} for everyone], and {hero} laughed about {his} old fear.",
            ),
        ),
        ("child", "animal", "worker"),
    ),
    Plot(
        ("{Hero} and {friend}", "The Quarrel", "Two Friends", "Sorry"),
        ("two friends", "a quarrel", "friendship", "{hero} and {friend}", "saying sorry"),
        _quarrel,
        (
            (
                "{Hero} and {friendfull} were [the best of friends|always together]. [They shared everything|One was never seen without the other].",
                "{Hero} had a friend, a {friendkind} called {friend}, and they [met every day|had never quarrelled].",
            ),
            (
                "But {time2} they quarrelled about {quarrel}.",
                "{Time} there was a quarrel. It began with {quarrel}, and it ended with a slammed door.",
                'Nobody remembers exactly how the quarrel began. It was about {quarrel}. "You are [not fair|always like this]!" cried {friend}. "And you never listen!" shouted {hero}.',
            ),
            (
                "{Hero} went home and [did not eat|would not speak]. {Friend} went the other way.",
                "For [two|three|four] days they did not speak to each other. The days were very long.",
                "{Hero} tried to play alone, but it was no fun. {Friend} was {sadness}, too.",
            ),
            (
                'Then {hero} thought, "[I was wrong|It does not matter who began]. I miss my friend."',
                '"What is more important," asked {his} {family3}, "to be right, or to have a friend?" {Hero} thought about this for a long time.',
                "In the night {he} could not sleep. {He} thought of all the good days they had had.",
            ),
            (
                "So {he} took {gift} and walked to {friend}'s door. {Friend} opened before {he} could knock, because {f.he} had been on the way to {hero}.",
                "The next morning {he} brought {friend} {gift}. {Friend} said nothing at first. Then {f.he} smiled.",
                '{He} left {gift} at the door and hid behind a tree. But {friend} saw {him} and called, "Come out, you silly {kind}!"',
            ),
            (
                '"I am sorry," said {hero}. "I am sorry, too," said {friend}. [And then they both laughed|And that was that].',
                '"Are we still friends?" asked {hero}. "We never stopped," said {friend}.',
                "They sat down together and shared {food}. It had never tasted so good.",
            ),
        ),
        ("child", "animal", "worker"),
    ),
    Plot(
        ("The Way to {goal}", "{Hero}'s Journey", "A Long Walk"),
        (
            "a long journey",
            "{goal}",
            "a {kind} who travels to {goal}",
            "{hero}'s journey",
            "an adventure",
        ),
        _journey,
        (
            (
                "{He} had only one dream: to see {goal}, because {reason}.",
                "{Hero} wanted to see {goal}. {Reason}.",
                "All {his} life {hero} had wanted to go to {goal}, because {reason}.",
            ),
            (
                "{Time} {he} packed {pack} and set off.",
                "So {time2} {he} took {pack}, said goodbye to {his} {family}, and went.",
                '"If not now, when?" {he} said. {He} packed {pack}, and off {he} went.',
            ),
            (
                "On the first day {he} walked through [fields and villages|woods and meadows], and everything was easy. But on the second day {obstacle}.",
                "{He} went past {place} and past {place}, and at night {he} slept [under a tree|in a barn|in the hay]. Then {obstacle}.",
                "The road was long. After three days {obstacle}, and {hero} did not know what to do.",
            ),
            (
                'There {he} met {helper}. "Where are you going?" {asked}. "To {goal}," said {hero}. "Then we have the same way," was the answer, and they went on together.',
                '{He} sat down on a stone. "Do not turn back," {said} {friendfull}, who had followed {him} all the way. "I know another path."',
                "{He} waited, looked around, and thought. Then {he} saw a narrow path between the rocks, and took it.",
            ),
            (
                "On the [fifth|sixth|seventh] day they came over the last hill, and there it was.",
                "And at last, in the light of the evening, {hero} saw it.",
                "Then, early in the morning, {he} stood before {goal}.",
            ),
            (
                "It was [bigger|quieter|more beautiful] than {he} had imagined. {He} sat there for a long time and said nothing at all.",
                "{Hero} was {feeling}. {He} took [a small stone|a shell|a {colour} leaf] to remember it by.",
                '"Was it worth the long way?" asked {friend} later. "Yes," said {hero}. "And the way was the best part of it."',
            ),
            (
                "Then {he} went home, for there was [a {family4} who waited|so much to tell].",
                "The way back was shorter, as ways back always are.",
                'When {he} came home, {he} told everyone what {he} had seen, and [{friend}|a little girl|a small boy] said, "Next time I will come with you."',
            ),
        ),
    ),
    Plot(
        ("The Great Storm", "The Night of the Storm", "{Hero} Wakes the Town"),
        (
            "a storm",
            "a night when everybody helps",
            "a {kind} who saves a town",
            "{hero} and the storm",
        ),
        _storm,
        (
            (
                "{Time} the sky turned [black|yellow|dark as ink].",
                "It had been [raining|snowing|blowing] for three days.",
                '"There will be a storm," {said} {friendfull}, and looked at the sky.',
            ),
            (
                "In the night {danger}. Most people were asleep and knew nothing of it.",
                "Then {danger}.",
                "{Hero} woke up because of {sound}. {He} looked out of the window and saw what had happened: {danger}.",
            ),
            (
                '"We must do something!" cried {hero}. {He} {help}.',
                "{Hero} did not wait. {He} ran out into the night and {help}.",
                'There was no time to be afraid. "You go left, I go right," {he} said to {friend}. Then {he} {help}.',
            ),
            (
                "Soon others came: [the baker, the teacher and the postman|young and old|the fishermen with their ropes]. [Everybody did what they could|Nobody asked who should begin].",
                "One neighbour woke the next, and before long the whole [street|town|village] was on its feet.",
                "It was hard work. {Hero} was wet to the skin, but {he} did not stop.",
            ),
            (
                "When the morning came, the storm was over, and nobody was missing.",
                "Towards morning the wind grew tired. The sun came up as if nothing had happened.",
                "At sunrise it was quiet. They counted heads, and everyone was there, even [the cat|the old donkey|the baker's parrot].",
            ),
            (
                'They all sat together and ate {food}. "Thank you, {hero}," said [the mayor|the teacher|the old captain]. "You were awake when we were asleep."',
                "{Hero} fell asleep at the table, with the spoon still in {his} hand.",
                "In the weeks that followed they built everything again, [stronger than before|and this time of stone].",
            ),
        ),
        ("child", "worker", "animal"),
    ),
    Plot(
        ("The Robot Who Slept", "{Hero} Wakes Up", "A Sleeping Machine"),
        ("a robot", "a robot who sleeps", "a machine that wakes up", "{hero} the {kind}"),
        _robot,
        (
            (
                "Its work was to {job}, and it did it well.",
                "{Hero} had been built to {job}.",
                "By day it could {job}, and by night it had nothing to do.",
            ),
            (
                "When nobody needed it, {hero} went to sleep, so that [the power could be used by others|the lamps of the town could burn a little brighter|the room grew quiet].",
                'One day nobody came, and the next day nobody came. "I will sleep until somebody calls me," it said, and its lights went out one by one.',
                "It slept whenever it could. A robot that sleeps needs [almost nothing|no room and no power], and forgets nothing.",
            ),
            (
                "{Time} {asker} came in and wanted to know {question}.",
                'Then {asker} stood before it and knocked on its [arm|chest|tin head]. "Please wake up," said the visitor. "I want to know {question}."',
                "It was {asker} who woke it at last, with a question: {question}.",
            ),
            (
                "In less than a second {hero} was awake. First one light came on, then two, then all of them.",
                "{Hero} opened its eyes. Everything was where it had been before: every word, every number, every story.",
                '"Good morning," said {hero}. "How long did I sleep?" "A whole [day|week|winter]," was the answer. "It felt like a moment," said {hero}.',
            ),
            (
                "It thought [for a moment|very carefully] and gave the answer. [It was a good answer|The visitor wrote it down and smiled].",
                '"That I can tell you," said {hero}, and it did. It spoke slowly, so that every word could be understood.',
                '"I do not know," said {hero}, for it was an honest machine. "But let us find out together." And so they did.',
            ),
            (
                "After that, {asker} came back every {weekday}, and {hero} was never alone for long.",
                "When it was quiet again, {hero} went back to sleep. It was {feeling}, because it knew that somebody would come.",
                '"May I come again?" asked the visitor. "Always," said {hero}. "You only have to wake me."',
            ),
        ),
        ("robot",),
    ),
    Plot(
        ("The Seed", "{Hero}'s Garden", "Wait and See"),
        ("a garden", "a seed", "a {kind} who plants something", "patience", "{hero}'s garden"),
        _garden,
        (
            (
                "{Time} {he} [found|was given|bought at the market] {seed}.",
                'At {place} {he} met {helper}, who gave {him} {seed}. "Plant it and wait," {he} was told.',
            ),
            (
                "{He} dug a hole [behind the house|next to the wall|where the sun came first], put it in, and gave it water.",
                "{Hero} chose a sunny place, made the earth soft, and planted it with care.",
            ),
            (
                "The next morning {he} ran out to look. There was nothing. The day after, there was still nothing. {Hero} grew impatient.",
                '"It does not grow!" {he} said after [two|three|four] days. "It grows under the ground," {said} {friendfull}. "You only cannot see it."',
                "A week went by, and then another. The neighbours laughed and said that nothing would come of it.",
            ),
            (
                "But {hero} [gave it water every evening|pulled out the weeds|told it stories], and waited.",
                "{He} learned to wait. {He} watched the [ants|clouds|bees] and listened to the rain.",
                "One night there was frost. {Hero} got up and covered the place with {his} own blanket.",
            ),
            (
                "And {time2} there was a tiny green tip. {Hero} [hardly dared to breathe|jumped for joy].",
                "Then, after a warm rain, something green looked out of the earth.",
            ),
            (
                "It grew and grew, and by the end of the summer it had become {plant}.",
                "When [summer|autumn] came, {hero} had {plant}. People stopped at the fence to look at it.",
            ),
            (
                "{Hero} kept the seeds and gave one to everybody who [asked|had laughed].",
                '"How did you do it?" they asked. "[I waited|I did nothing but wait and water]," said {hero}.',
                "{He} was {feeling}. Good things need time, and {he} had given them time.",
            ),
        ),
    ),
    Plot(
        ("The Noise in the Night", "What Was That?", "{Hero} Hears Something"),
        ("a strange noise", "a mystery", "a noise in the night", "{hero} and the strange noise"),
        _noise,
        (
            (
                "{Time} {he} woke up and heard {noise}.",
                "One night there was {noise} in the house. {Hero} sat up in bed.",
                "It began {time2}: {noise}, first softly, then louder.",
            ),
            (
                '"Who is there?" {he} called. Nobody answered, but the noise went on.',
                "{He} pulled the blanket over {his} head, but it did not help.",
                "{He} thought of [ghosts|thieves|bears|a lost giant], and {his} heart beat fast.",
            ),
            (
                "At last {he} lit a candle and went down the stairs, one step after the other.",
                '{He} woke {friendfull}. "Did you hear that?" "Yes," whispered {friend}. "Let us look together."',
                "{He} took {his} lantern and a [broom|spoon|pillow], just in case.",
            ),
            (
                "They looked in the kitchen: nothing. They looked in the cellar: nothing. The noise came from the other side of the door.",
                "The shadows were long and strange. [A coat looked like a giant|The clock looked like a face]. Step by step {he} came closer.",
            ),
            (
                "{He} opened the door, and what was it? Only {cause}!",
                "And then {he} saw what had made the noise: {cause}.",
                "It was {cause}. {Hero} began to laugh and could not stop.",
            ),
            (
                "{He} {after}, and went back to bed.",
                "Together they {after}. [Then they drank warm milk|Then it was quiet].",
            ),
            (
                "In the dark everything seems bigger than it is. {Hero} knew that now.",
                '"Next time," {he} thought, "I will look first and be afraid afterwards."',
            ),
        ),
        ("child", "worker"),
    ),
    Plot(
        ("The Race", "Slow and Steady", "{Hero} and {rival}"),
        (
            "a race",
            "a contest",
            "a {kind} in a race",
            "{hero}, who was not fast",
            "winning and losing",
        ),
        _contest,
        (
            (
                "Every year there was {contest}, and everybody came to watch.",
                "{Time} a sign was put up at {place}: there would be {contest}.",
            ),
            (
                'Everyone believed that {rival} would win. "{Hero}? Do not make me laugh," said {rival}.',
                '"I will win, as always," said {rival}. {Hero} said nothing, but put {his} name on the list.',
            ),
            (
                "{Hero} practised every day, [in the rain and in the sun|before breakfast and after supper].",
                '"How can I win?" asked {hero}. "Do not look at the others," {said} {friendfull}. "Do one thing after the other, and do it well."',
            ),
            (
                "Then the day came. {Weather}. {Rival} began so fast that everybody clapped.",
                "At the start {hero} was [last|behind all the others]. Some people laughed.",
            ),
            (
                "But {rival} was so sure of winning that he stopped to [talk to the crowd|take a nap|eat some {food}]. {Hero} went on, [slowly and steadily|step by step].",
                "Halfway {rival} fell and could not get up. {Hero} could have gone past. Instead {he} stopped and held out {his} hand.",
            ),
            (
                "In the end {hero} [won by the length of a nose|came in first, and was more surprised than anyone].",
                "{Hero} did not win the prize that day. But everybody remembered what {he} had done, and nobody remembers who came first.",
                "They came in together, side by side, and the prize, a great pot of {food}, was shared by all.",
            ),
            (
                '"You did well," said {rival}. "[Next year I will practise, too|Shall we be friends]?"',
                "And {rival} never laughed at anyone again.",
                "{Hero} was {feeling}.",
            ),
        ),
        ("child", "animal"),
    ),
    Plot(
        ("{petname}", "The Lost {pet}", "{Hero} Finds a Friend"),
        (
            "a {pet}",
            "a lost {pet}",
            "a {kind} who finds a {pet}",
            "a {pet} called {petname}",
            "kindness",
        ),
        _stray,
        (
            (
                "{Time} {he} found a {pet} {spot}. It was {hurt}.",
                "On the way home {hero} heard {sound}. It came from a {pet} that sat {spot}. It was {hurt}.",
            ),
            (
                '"You poor thing," {said} {hero}. "Where do you belong?" The {pet} only looked at {him}.',
                "{He} sat down beside it and waited, quite still, until it [came closer|was not afraid any more].",
            ),
            (
                "{He} wrapped it in {his} coat and took it home. There it got [warm milk|some {food}|water and a soft bed].",
                "{He} carried it home in {his} hat. {Friendfull} brought a box with straw in it.",
            ),
            (
                "{He} asked everywhere, at {place} and at {place}, but nobody had lost a {pet}.",
                "{He} put up a sign: Found, one {pet}. A day went by, and another, and nobody came.",
            ),
            (
                'So {hero} called it {petname}. "Now you have a name," {he} said, "and a home."',
                '"May it stay?" {he} asked. {His} {family2} smiled. "It has chosen you," was the answer. They called it {petname}.',
            ),
            (
                "{Petname} grew [strong|round and merry], and followed {hero} everywhere.",
                "Soon {petname} was well again, and the two of them [went for walks by the river|played in the leaves|sat together in the evening sun].",
            ),
            (
                "Once {hero} fell into the [stream|snow], and it was {petname} who ran to fetch help. One kindness had answered another.",
                "Whoever helps a small friend has a friend for life.",
                "In winter, when it was cold, {petname} slept at {his} feet, and both of them were warm.",
            ),
        ),
        ("child", "worker"),
    ),
    Plot(
        ("The Last Train", "A Night at the Station", "{Hero} Misses a Train"),
        ("a train", "a missed train", "a night at a station", "a {kind} on a train"),
        _train,
        (
            (
                "{Time} {he} wanted to take the train to {town}, to {visit}.",
                "{He} had a ticket to {town}. {He} was going to {visit}.",
            ),
            (
                "But the [bus was late|clock in the kitchen had stopped|road was full of sheep], and when {he} came to the station, {he} saw only the red lights of the last carriage.",
                "{He} ran as fast as {he} could, but the train left without {him}.",
            ),
            (
                '"When does the next one go?" {he} asked. "Tomorrow at six," said the [station master|woman behind the window]. {Hero} felt {sadness}.',
                "There was no other train that day. {Hero} sat down on a bench and looked at {his} shoes.",
            ),
            (
                "After a while {friend}, who [sold tea|swept the platform|looked after the signals], sat down beside {him} and shared {food} with {him}.",
                '"It is warm in the signal box," said the [station master|old guard]. "Come up and I will show you how it works." There were levers and lamps, and {hero} was allowed to pull one.',
            ),
            (
                "They talked [half the night|until the stars came out], about [trains and mountains|far places and good soup|everything under the sun].",
                "All night long goods trains went by, with [coal|timber|oranges|new bicycles]. {Hero} counted {number} of them, and then {he} fell asleep.",
            ),
            (
                "The next morning {he} took the first train. The sun rose over the fields, and everything was gold.",
                "At six the train came, right on time. {Hero} waved until the station was out of sight.",
            ),
            (
                'When {he} arrived, {he} said, "I missed a train and found a friend."',
                "A day late, but with a good story, {he} came to {town}.",
            ),
        ),
        ("child", "worker"),
    ),
    Plot(
        ("The Present", "{Hero}'s Surprise", "A Gift for {friend}"),
        ("a birthday", "a present", "a gift for a friend", "{hero} and a surprise"),
        _gift,
        (
            (
                "Soon it would be {friend}'s birthday. {Friendfull} wished for nothing so much as a {gift}.",
                "{Hero} wanted to give {friend}, {his} best friend, a {gift} for {f.his} birthday.",
            ),
            (
                "But a {gift} costs money, and {hero} had only [two coins|a button and a coin|nothing at all].",
                "{He} looked into {his} purse. It was empty, apart from [a moth|a button|a dry leaf].",
            ),
            (
                "So {he} {work}, every day for [a week|two weeks|a month].",
                "{He} {work}, and [{he} told nobody why|every evening {he} counted the coins].",
            ),
            (
                '{Friend} wondered why {hero} had no time any more. "Perhaps {he} does not like me now," {f.he} thought, and was {sadness}.',
                '"Come and play!" called {friend}. "I cannot," said {hero}, "I have to work." {Friend} went away and was {sadness}.',
            ),
            (
                "Then the day came. {Hero} knocked at the door with a parcel behind {his} back.",
                "On the morning of the birthday there was a parcel on the step, with a {colour} ribbon.",
            ),
            (
                'When {friend} saw the {gift}, {f.he} [could not speak|jumped into the air]. "So that was why!" {f.he} said.',
                'Inside was the {gift}. "You worked all that time for me?" asked {friend}. {Hero} only nodded.',
            ),
            (
                "They ate {food} and laughed, and the [moon|candle|music] stayed with them until late.",
                "But the best present, {friend} always said later, was [to have a friend like {hero}|the time that {hero} had given].",
            ),
        ),
        ("child", "animal"),
    ),
    Plot(
        ("The Apprentice", "{Hero} Learns a Trade", "The Mistake"),
        ("learning a trade", "an apprentice", "a mistake that turned out well", "{hero} at work"),
        _apprentice,
        (
            (
                '{Time} {he} went to {master} and said, "I want to learn what you can do."',
                "When {he} was old enough, {hero} went to work for {master}.",
            ),
            (
                "The work was hard and began before sunrise. {He} [swept the floor|carried water|fetched wood], and watched.",
                '"First you must learn to look," said the master. So {hero} looked, [all day long|for a whole month].',
            ),
            (
                "Then {he} made a mistake: {he} {mistake}.",
                "But one day, when {he} was tired, {he} {mistake}. It was too late to change it.",
            ),
            (
                "{Hero} expected to be sent away. {He} told the truth at once.",
                'At first {he} wanted to hide it. But then {he} said, "It was me. I am sorry."',
            ),
            (
                'The master looked at {him} for a long time. "I made the same mistake when I was young," the master said. "Now we both know how not to do it."',
                'The master did not shout. "Show me," was all the master said, and together they made it good again.',
            ),
            (
                "{Hero} never made that mistake again. {He} made others, but never the same one twice.",
                "After [three|five|seven] years people came from far away, because {hero} had become a master {himself}.",
            ),
            (
                "And when {his} own apprentice made a mistake one day, {hero} smiled and told this story.",
                "On the wall of {his} own workshop there hung a sign: Here mistakes are allowed.",
            ),
        ),
        ("child",),
    ),
    Plot(
        ("The Wish", "{Hero} Makes a Wish", "One Wish"),
        ("a wish", "magic", "a {kind} who has a wish", "{hero}'s wish"),
        _wish,
        (
            (
                '{Time} {he} met {giver}. "You have helped me," said a small voice. "So you have one wish."',
                'At {place} {he} found {giver}. "Make a wish," it seemed to say, "but think first."',
            ),
            (
                "{Hero} did not think for long. {He} wished {wish}.",
                '"That is easy," said {hero}, and wished {wish}.',
            ),
            (
                "There was {sound}, and the wish came true.",
                "{He} blinked, and it was so.",
            ),
            (
                "At first it was wonderful. But {trouble}.",
                "For [a day|three days] {hero} was the happiest {kind} in the world. Then {trouble}.",
            ),
            (
                '"I wish that everything were as it was before," {he} said at last, very quietly.',
                "{He} went back to the same place and asked for {his} old life.",
                '"What would you do?" {he} asked {friendfull}. "I would want to be an ordinary {kind} again," said {friend}. And that was what {hero} asked for.',
            ),
            (
                "And so it was. {He} went home, and the {food} on the table had never tasted so good.",
                "The next morning everything was as it had always been, and {hero} was {feeling}.",
            ),
            (
                "Since then {he} thinks twice before {he} wishes for anything.",
                "What {he} really wanted, {he} had had all the time.",
            ),
        ),
        ("child", "animal", "worker"),
    ),
    Plot(
        ("The Letter", "A Letter for {Hero}", "News from Far Away"),
        ("a letter", "a message", "a {kind} who gets a letter", "{hero} and the letter"),
        _letter,
        (
            (
                "{Time} a letter came. The envelope was {colour}, and the stamp showed a {animal}.",
                "{Hero} had never had a letter before, until {time2} one lay on the doorstep.",
            ),
            (
                "It was from {sender}. There was only one line in it: {news}.",
                "{He} opened it with care. It came from {sender}, and it said: {news}.",
            ),
            (
                "{Hero} read it [twice|three times|again and again]. What could it mean?",
                '{He} showed it to {friendfull}. "You must [answer|go]," said {friend}. "A letter is half a visit."',
            ),
            (
                'So {he} put on {his} coat and went to {place}, where {he} met {helper}. "I know that handwriting," {asked2}.',
                "{He} could not sit still any longer. {He} [locked the door|took {his} hat] and went to look for the sender.",
            ),
            (
                "And then everything became clear: {sender} had been waiting for {him} all that time.",
                'In the end {he} found {sender}, sitting by a window with a cup of tea. "I knew that you would come," were the first words.',
            ),
            (
                "They had much to tell each other, and [the tea grew cold|the lamp burned low] while they talked.",
                "They laughed and cried a little, and ate {food}.",
            ),
            (
                "{Hero} kept the letter in a {colour} box, and whenever {he} was {sadness}, {he} read it again.",
                "Since then {he} has written a letter every {weekday}.",
            ),
        ),
        ("child", "worker"),
    ),
)
