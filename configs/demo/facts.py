"""What the corpus says of the world: short tables, from which prose and answers are made."""

from typing import NamedTuple


class Animal(NamedTuple):
    """An animal in sentences: it {is}, lives {home}, eats {food}."""

    name: str
    plural: str
    group: str
    look: str
    home: str
    food: str
    habit: str
    young: str
    sound: str


class Country(NamedTuple):
    name: str
    capital: str
    continent: str
    known_for: str


def words_of(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


def _rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


ANIMALS = [
    Animal(*row)
    for row in _rows("""
cat | cats | mammal | soft, quiet and quick | in houses and on farms | mice and fish | sleeps for most of the day | kitten | meows
dog | dogs | mammal | friendly and faithful | with people | meat, bones and much else | follows its nose | puppy | barks
cow | cows | mammal | big and calm | on farms | grass and hay | chews its food twice | calf | moos
horse | horses | mammal | strong and fast | in fields and stables | grass, hay and oats | can sleep standing up | foal | neighs
sheep | sheep | mammal | woolly and shy | on meadows and hills | grass | follows the others | lamb | bleats
goat | goats | mammal | sure of its feet | on farms and in the mountains | leaves and grass | climbs where nobody else can | kid | bleats
pig | pigs | mammal | clever and curious | on farms | roots, fruit and corn | rolls in the mud to stay cool | piglet | grunts
donkey | donkeys | mammal | patient and careful | on farms | grass and thistles | carries heavy loads | foal | brays
fox | foxes | mammal | red and clever | in forests and fields | mice, berries and eggs | hunts at night | cub | barks
wolf | wolves | mammal | grey and wild | in forests and mountains | deer and hares | lives in a pack | pup | howls
bear | bears | mammal | big and strong | in forests | fish, roots, berries and honey | sleeps through the winter | cub | growls
rabbit | rabbits | mammal | soft, with long ears | in burrows under the ground | grass and leaves | hops away when it is frightened | kit | is almost always silent
mouse | mice | mammal | very small and quick | in fields and in houses | seeds and crumbs | stores food for the winter | pup | squeaks
squirrel | squirrels | mammal | quick, with a bushy tail | in trees | nuts and seeds | buries nuts and forgets some of them | kit | chatters
hedgehog | hedgehogs | mammal | small and full of spines | in gardens and hedges | beetles, worms and snails | rolls into a ball when it is afraid | hoglet | snuffles
bat | bats | mammal | small, with wings of skin | in caves and under roofs | moths and flies | finds its way by listening to echoes | pup | squeaks
elephant | elephants | mammal | very large, with a long trunk | in the grasslands and forests of Africa and Asia | grass, leaves and bark | remembers places for many years | calf | trumpets
giraffe | giraffes | mammal | the tallest animal of all | in the grasslands of Africa | leaves of tall trees | sleeps for only a short time each day | calf | hums very softly
lion | lions | mammal | golden and strong | in the grasslands of Africa | antelopes and zebras | lives in a family that is called a pride | cub | roars
tiger | tigers | mammal | large and striped | in the forests of Asia | deer and wild pigs | hunts alone and swims well | cub | roars
monkey | monkeys | mammal | nimble and clever | in warm forests | fruit, leaves and insects | swings from branch to branch | infant | chatters
camel | camels | mammal | tall, with one or two humps | in deserts | dry grass and thorny plants | can go without water for many days | calf | groans
kangaroo | kangaroos | mammal | strong, with long hind legs | in Australia | grass and leaves | carries its young in a pouch | joey | grunts
whale | whales | mammal | huge and gentle | in the sea | small fish and krill | comes up to the surface to breathe | calf | sings
dolphin | dolphins | mammal | smooth, fast and playful | in the sea | fish and squid | sleeps with one half of its brain at a time | calf | clicks and whistles
seal | seals | mammal | round and smooth | on cold coasts | fish | dives deep and rests on the ice | pup | barks
otter | otters | mammal | playful, with thick fur | in rivers and along coasts | fish and mussels | floats on its back | pup | whistles
beaver | beavers | mammal | brown, with a flat tail | in rivers and lakes | bark and twigs | builds dams of branches and mud | kit | slaps the water with its tail
deer | deer | mammal | shy and graceful | in forests | leaves and grass | listens all the time | fawn | barks when it is alarmed
owl | owls | bird | quiet, with large eyes | in woods and old barns | mice and voles | hunts at night without a sound | owlet | hoots
crow | crows | bird | black and very clever | in woods and towns | nearly everything | solves puzzles and remembers faces | chick | caws
robin | robins | bird | small, with a red breast | in gardens and woods | insects and berries | sings even in winter | chick | sings
sparrow | sparrows | bird | small and brown | in towns and on farms | seeds and crumbs | bathes in dust | chick | chirps
swallow | swallows | bird | slim, with a forked tail | in barns, and far in the south in winter | insects | flies thousands of miles every year | chick | twitters
penguin | penguins | bird | black and white | on the coasts of the south | fish and krill | swims very well but cannot fly | chick | brays
duck | ducks | bird | broad in the beak | on ponds and rivers | plants, snails and insects | keeps its feathers dry with oil | duckling | quacks
goose | geese | bird | large and loud | near lakes and on farms | grass | flies in a long line with the others | gosling | honks
hen | hens | bird | busy and round | on farms | corn and worms | lays eggs | chick | clucks
parrot | parrots | bird | bright in its colours | in warm forests | seeds, nuts and fruit | can copy the sounds it hears | chick | screeches
frog | frogs | amphibian | green or brown, with a wide mouth | in ponds and wet meadows | insects | catches flies with its tongue | tadpole | croaks
turtle | turtles | reptile | slow, with a hard shell | in the sea, in rivers and on land | plants and small animals | carries its house on its back | hatchling | is almost always silent
snake | snakes | reptile | long and without legs | in many warm places | mice, eggs and frogs | smells with its tongue | hatchling | hisses
crocodile | crocodiles | reptile | long and strong | in warm rivers | fish and other animals | lies still for hours and waits | hatchling | growls
bee | bees | insect | small and striped | in a hive | nectar and pollen | dances to tell the others where flowers are | larva | buzzes
ant | ants | insect | tiny and strong | in nests under the ground | seeds, insects and sweet things | carries much more than its own weight | larva | is silent
butterfly | butterflies | insect | light, with coloured wings | in meadows and gardens | nectar | begins its life as a caterpillar | caterpillar | is silent
spider | spiders | arachnid | small, with eight legs | in corners and between branches | flies and other insects | spins a web of fine threads | spiderling | is silent
snail | snails | mollusc | slow, with a round shell | in damp gardens | leaves | sleeps in its shell when it is dry | hatchling | is silent
octopus | octopuses | mollusc | soft, with eight arms | on the floor of the sea | crabs and mussels | can change its colour | larva | is silent
shark | sharks | fish | grey and fast | in the sea | fish and other animals of the sea | can smell very small traces in the water | pup | is silent
salmon | salmon | fish | silver and strong | in the sea and in rivers | small fish and insects | returns to the river where it was born | fry | is silent
""")
]

COUNTRIES = [
    Country(*row)
    for row in _rows("""
France | Paris | Europe | bread, cheese and long rivers
Germany | Berlin | Europe | forests, old towns and trains
Italy | Rome | Europe | pasta, mountains and old stones
Spain | Madrid | Europe | oranges, music and warm evenings
Portugal | Lisbon | Europe | sailors, tiles and a long coast
Austria | Vienna | Europe | mountains and waltzes
Switzerland | Bern | Europe | mountains, watches and trains
Belgium | Brussels | Europe | chocolate and bicycles
the Netherlands | Amsterdam | Europe | canals, tulips and bicycles
Denmark | Copenhagen | Europe | islands and bicycles
Norway | Oslo | Europe | deep fjords and snow
Sweden | Stockholm | Europe | forests and lakes
Finland | Helsinki | Europe | lakes, forests and saunas
Iceland | Reykjavik | Europe | volcanoes and hot springs
Ireland | Dublin | Europe | green hills and songs
the United Kingdom | London | Europe | tea, rain and old railways
Poland | Warsaw | Europe | forests, soups and old towns
the Czech Republic | Prague | Europe | bridges and castles
Hungary | Budapest | Europe | hot springs and music
Greece | Athens | Europe | islands, olives and old stories
Romania | Bucharest | Europe | mountains and castles
Croatia | Zagreb | Europe | islands and a blue sea
Ukraine | Kyiv | Europe | wide fields of wheat and sunflowers
Estonia | Tallinn | Europe | forests and old towers
Turkey | Ankara | Asia and Europe | tea, bazaars and two continents
Egypt | Cairo | Africa | pyramids and a great river
Morocco | Rabat | Africa | mountains, markets and mint tea
Kenya | Nairobi | Africa | grasslands, lions and elephants
Nigeria | Abuja | Africa | music and great cities
Ghana | Accra | Africa | cocoa and bright cloth
Ethiopia | Addis Ababa | Africa | coffee and high mountains
Senegal | Dakar | Africa | fishing boats and drums
India | New Delhi | Asia | spices, trains and many languages
China | Beijing | Asia | tea, a great wall and great cities
Japan | Tokyo | Asia | cherry trees, islands and fast trains
South Korea | Seoul | Asia | mountains and very good soups
Thailand | Bangkok | Asia | temples and warm rain
Vietnam | Hanoi | Asia | rice fields and noodle soup
Indonesia | Jakarta | Asia | thousands of islands
Nepal | Kathmandu | Asia | the highest mountains of the world
Mongolia | Ulaanbaatar | Asia | wide grasslands and horses
Iran | Tehran | Asia | carpets, gardens and poems
Saudi Arabia | Riyadh | Asia | deserts
the Philippines | Manila | Asia | islands and warm seas
Australia | Canberra | Australia | kangaroos and red deserts
New Zealand | Wellington | Oceania | sheep, mountains and green valleys
Canada | Ottawa | North America | maple trees, lakes and snow
the United States | Washington | North America | wide plains and tall cities
Mexico | Mexico City | North America | maize, music and old pyramids
Cuba | Havana | North America | old cars and music
Brazil | Brasilia | South America | the largest rain forest of the world
Argentina | Buenos Aires | South America | wide plains and dancing
Chile | Santiago | South America | a very long coast and high mountains
Peru | Lima | South America | mountains, potatoes and old cities
Colombia | Bogota | South America | coffee and green mountains
Uruguay | Montevideo | South America | beaches and wide meadows
""")
]

COLOURS = dict(
    _rows("""
the sky on a clear day | blue
grass | green
snow | white
a lemon | yellow
a ripe banana | yellow
blood | red
a ripe tomato | red
a carrot | orange
coal | black
milk | white
chocolate | brown
an elephant | grey
a leaf in spring | green
a crow | black
the sea | blue
a sunflower | yellow
an orange | orange
""")
)
MIXED = [
    ("blue", "yellow", "green"),
    ("red", "yellow", "orange"),
    ("red", "blue", "purple"),
    ("black", "white", "grey"),
    ("red", "white", "pink"),
]
OPPOSITES = _rows("""
hot | cold
big | small
tall | short
fast | slow
day | night
light | dark
happy | sad
open | closed
full | empty
old | young
early | late
wet | dry
loud | quiet
up | down
left | right
hard | soft
heavy | light
asleep | awake
near | far
rich | poor
long | short
good | bad
strong | weak
begin | end
summer | winter
""")
LEGS = [
    ("a spider", 8),
    ("an ant", 6),
    ("a cat", 4),
    ("a dog", 4),
    ("a hen", 2),
    ("a horse", 4),
    ("a bee", 6),
    ("a table", 4),
    ("a snake", 0),
    ("a duck", 2),
    ("an octopus", 8),
]
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
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
NUMBERS = words_of(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)

# What a thing is, and what one does with it.
THINGS = _rows("""
bicycle | a vehicle with two wheels and pedals | You ride it, and your own legs are the engine
kettle | a pot with a spout in which water is boiled | It is used to make tea
library | a house full of books that everybody may read | You can borrow a book and bring it back later
lighthouse | a tower with a strong light at the top | It shows ships where the rocks are
bridge | a road that goes over water, over a valley or over another road | It joins two places that were apart
clock | a machine that shows the time | The short hand shows the hour and the long hand the minute
map | a picture of a place as a bird would see it | It helps you to find the way
compass | a small instrument with a needle that points to the north | Sailors and hikers use it to find the way
telescope | a tube with lenses that makes far things look near | People look at the moon and the stars with it
train | a row of carriages that runs on rails | It carries people and goods from town to town
ship | a large boat | It carries people and goods across the sea
island | a piece of land with water on all sides | You reach it by boat, by air or over a bridge
river | water that flows through the land to the sea | Fish live in it, and boats travel on it
mountain | land that rises high above the land around it | The air at the top is cold and thin
volcano | a mountain from which hot melted rock can come | Most of them are quiet most of the time
desert | a place where it hardly ever rains | Few plants grow there, and the nights are cold
forest | a large place full of trees | Many animals live in it
garden | a piece of land where flowers, fruit or vegetables are grown | It needs water, sun and care
umbrella | a roof that you carry in your hand | It keeps you dry when it rains
candle | a stick of wax with a wick | It gives light when it burns
window | an opening in a wall with glass in it | It lets the light in and keeps the wind out
ladder | two long poles with steps between them | You use it to reach high places
wheel | a round thing that turns around its middle | Carts, cars and trains roll on wheels
computer | a machine that follows instructions very quickly | People use it to write, to calculate and to talk to each other
program | a list of instructions for a computer | The computer follows it step by step
robot | a machine that can do work by itself | Some robots build cars, and others clean floors
language model | a program that has learned from text which word is likely to come next | It writes one piece of a word after the other
token | a short piece of text, often a word or a part of one | Language models read and write tokens
memory | the place where things are remembered | Computers have it, and so do people
telephone | a machine that carries voices over a distance | You use it to talk to people who are far away
book | many pages with words or pictures, bound together | You read it from the beginning to the end
letter | a message on paper | You put it in an envelope and send it
school | a place where people learn | Children go there to learn to read, write and count
museum | a house where old or beautiful things are kept | Everybody may come and look at them
market | a place where people buy and sell things | You find fruit, bread and flowers there
harbour | a safe place for ships | Ships are loaded there and wait for good weather
cloud | a great number of tiny drops of water in the air | When the drops grow heavy, it rains
rainbow | a band of colours in the sky | You see it when the sun shines on rain
moon | the ball of rock that travels around the earth | It has no light of its own and shines because the sun shines on it
sun | the star that is nearest to us | It gives us light and warmth
star | a ball of hot, bright gas, very far away | You see stars at night when the sky is clear
planet | a large ball that travels around a star | The earth is a planet
magnet | a piece of metal that pulls iron | You can use one to find a lost needle
mirror | a smooth piece of glass that shows what is in front of it | You see yourself in it
seed | the small thing from which a plant grows | It needs water, warmth and earth
""")
