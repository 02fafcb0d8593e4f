"""Topics of the expository prose: sentences that begin a paragraph, sentences that may follow in any order, last ones."""

from typing import NamedTuple


class Topic(NamedTuple):
    """What is said of something.

    Attributes:
        first, more, last: templates.
    """

    first: tuple[str, ...]
    more: tuple[str, ...]
    last: tuple[str, ...]


def _topic(first: str, more: str, last: str) -> Topic:
    return Topic(*(tuple(text.strip().splitlines()) for text in (first, more, last)))


TOPICS: dict[str, Topic] = {
    "artificial intelligence": _topic(
        """
The future of artificial intelligence is [not written yet|open|a question that many people ask|still being made|harder to predict than the weather|closer than many people think|in the hands of those who use it|likely to be quieter than we imagine].
The future of artificial intelligence is [likely|bound|sure] to [bring machines that help with everyday work|surprise us|depend on the people who build it|be shaped by small and careful steps|change the way we learn and work].
The future of artificial intelligence is [a story with many authors|a long road with many turns|like a map with white places on it], and [nobody knows how it will end|we have only read the first pages|everybody may help to write it].
The future of artificial intelligence is [bright|uncertain|exciting], [but it needs care|because there is still so much to discover|and it belongs to all of us].
The future of artificial intelligence is in [small models that run anywhere|machines that sleep until they are needed|tools that are simple to use|computers that explain what they do|programs that know when they do not know].
The future of artificial intelligence will be decided by [the questions that we ask|many small ideas|people who care about others|what we want it to do].
The future of [computers|machines|technology|work|the world|our cities] is [open|not written yet|in our hands|hard to predict|full of surprises|made by people].
Artificial intelligence is [a tool|a young science|the art of teaching machines to answer], [and like every tool it can be used well or badly|and it has a long way to go].
Artificial intelligence began with a simple question: can a machine learn?
In the future, machines will [help doctors to read pictures|answer questions in every language|do the dull work, so that people have time for the rest|listen better than they do today].
A machine that learns [needs many examples|makes many mistakes at first|is only as good as what it has read].
""",
        """
Some machines will [read old letters|help teachers|look for new medicines|watch the forests for fire], and others will [write music|steer ships|sort parcels|keep the lamps burning].
A model learns from text, [word after word|one small step after the other|as a child learns from stories], until it can guess what comes next.
Large models need a great deal of [power and memory|energy], so it is good to [let them sleep when nobody asks|share them|use a small one where a small one is enough].
Small models are [cheap and quick|not very clever, but quick|easy to understand], and often they are all that is needed.
A good machine should say "I do not know" when it does not know.
People will still have to [decide what is right|choose|think for themselves], because a machine does not know what is good for us.
The best machines [help us without getting in the way|save time|are those that we hardly notice].
It is important that [everybody can use them|they are fair and safe|we understand how they come to their answers].
Nobody should believe an answer only because a [machine|computer] has given it.
One day a computer may be as common a helper as [a lamp|a bicycle|a kettle] is today.
Many things that are hard for people are easy for machines, and many things that are easy for people are hard for machines.
What once filled a whole [room|house] fits into a [pocket|small box] today.
Teachers, doctors and farmers already use such machines every day.
Models that sleep give their memory back, and wake up in a moment when somebody asks.
""",
        """
What we make of it is up to us.
The rest is patience and good work.
We will see.
Perhaps the best is still to come.
Until then, we should ask good questions.
""",
    ),
    "computers": _topic(
        """
The computer is [a machine that follows instructions|one of the most useful machines that people have made|patient and very fast].
Computers [can count very quickly|do exactly what they are told|are everywhere].
The first computers filled whole rooms and [made a great noise|grew very warm].
A computer has a processor, which calculates, and memory, which remembers.
The screen of a computer shows [what the machine has found out|words and pictures made of tiny points].
The program [runs step by step|is a list of instructions] and does not get tired.
""",
        """
Every number, every word and every picture in a computer is made of zeros and ones.
The memory of a computer forgets everything when the power is gone, but a disk remembers.
A program is a list of instructions, as a recipe is for a cook.
A small mistake in a program can have strange results, so programs are tested.
The processor can do only simple things, but it does [millions|billions] of them in a second.
Two computers can talk to each other over a wire or through the air.
A graphics card does many small calculations at the same time.
People write programs in languages that were made for it.
When a computer is slow, it is often because it waits for something.
Good programs are [simple, clear and tested|easy to read and easy to change].
""",
        """
Without people, it would only be a warm box.
And yet it only does what somebody has told it.
That is the whole secret.
""",
    ),
    "sleeping models": _topic(
        """
A language model that nobody uses can sleep.
The server [lets a model sleep when nobody asks it anything|has many models, but only a few of them are awake at once].
When a model sleeps, it gives its memory back to the card.
The model is asleep, but [it has not forgotten anything|the first request will wake it].
Models are like [night porters|ferries|lighthouse keepers]: most of the time they wait.
Sleepserve is a server for language models whose replicas sleep when they have nothing to do.
The card has only so much memory, and [many models want it|every model needs a part of it].
""",
        """
The weights stay in the memory of the host, so that they can be copied back quickly.
A wake takes a fraction of a second, and the person who asks hardly notices it.
While it sleeps, other models can use the memory of the card.
When a request arrives, the weights travel back over the link, layer by layer.
However many requests arrive at once, one wake serves them all.
After the wake the answers are the same as before, token for token.
The addresses stay the same, so nothing that points at them breaks.
A health check does not wake a model, and it does not keep one awake.
The router sends a request to a model that is awake, if there is one with room.
A replica that has been idle for a minute goes to sleep by itself.
A model in deep sleep has to be read from the disk again, which takes longer.
After each wake a checksum tells whether every byte has arrived.
""",
        """
So many models can share one card.
That saves memory, power and money.
Nobody has to wait for long.
""",
    ),
    "sleep": _topic(
        """
Sleep is [good for body and mind|as important as food and water|a time to rest and to repair].
The best sleep comes [in a dark and quiet room|after a day in the fresh air|when there is nothing left to worry about].
People sleep for about a third of their lives.
Everybody needs sleep, [but not everybody needs the same amount of it|children more than grown-ups].
The body rests while we sleep, but the mind is busy.
At night the town grows quiet, and most people sleep.
""",
        """
Children need more sleep than grown-ups.
While we sleep, the mind sorts what it has seen during the day.
Dreams come mostly in the second half of the night, and most of them are forgotten.
A warm drink, a book and a fixed hour help many people to fall asleep.
Bright light in the evening keeps us awake.
Some animals sleep through the whole winter, and others sleep standing up.
Whoever sleeps too little [is easily cross|finds it hard to think|makes more mistakes].
A short nap in the afternoon can work wonders.
A good bed is neither too hard nor too soft.
""",
        """
In the morning the world looks different.
Good night.
Then the alarm clock rings, and a new day begins.
""",
    ),
    "memory": _topic(
        """
Memory is [what is left when the day is over|the treasure house of the mind|never quite exact].
The memory of people is [strange|not like a box]: [it keeps a song for fifty years and forgets a name in a minute|it keeps what was important and lets the rest go].
The best way to remember something is to [tell it to somebody|write it down|use it].
""",
        """
We remember stories better than numbers.
A smell can bring back a whole summer.
What we repeat, we keep.
Writing is a memory outside the head.
Old people often remember their childhood better than yesterday.
A computer has a fast memory for the moment and a slow one for the years.
A knot in a handkerchief was once the simplest kind of memory.
Sleep helps to keep what was learned during the day.
""",
        """
Forgetting is useful, too.
And some things one never forgets, such as how to ride a bicycle.
""",
    ),
    "the weather": _topic(
        """
The weather [is the oldest subject of conversation|changes quickly by the sea|will be fine tomorrow, or it will not].
The rain [began in the night and did not stop until morning|falls softly on the roofs|comes from the west].
The wind [blows from places where the air is heavy to places where it is light|turned to the north, and it grew cold].
The sun [rises in the east and sets in the west|came out at noon and dried the streets].
The snow [covered the fields and made the world quiet|fell all night long].
The clouds [are made of tiny drops of water|moved slowly over the hills].
The storm came [from the sea|over the mountains] and lasted until the evening.
Tomorrow it will [rain in the morning and be sunny in the afternoon|be cold and clear|be windy, with a little snow in the hills].
In [spring|summer|autumn|winter] the weather [is hard to predict|changes from hour to hour|is often better than people say].
""",
        """
When warm air rises, it cools down, and clouds are made.
Every snowflake has six sides, and hardly two of them are alike.
Thunder comes after lightning, because sound is slower than light.
Fog is a cloud that lies on the ground.
Farmers look at the sky in the evening to see what the morning will bring.
When swallows fly low, people say, it will rain soon.
A rainbow appears when the sun shines on the rain.
On a clear night it is colder than on a cloudy one, because clouds are like a blanket.
After the rain the air smells of earth and leaves.
There is no bad weather for those who have good shoes.
Frost draws flowers on the windows.
""",
        """
So it is wise to take an umbrella.
After rain comes sunshine.
And then the children ran out to play.
""",
    ),
    "trains": _topic(
        """
The train [leaves at seven in the morning|was late, as it often was in winter|runs on two rails of steel|crossed the bridge and went into the hills].
The railway [changed the way people travelled|follows the river for many miles].
Trains [are quiet and comfortable|carry people and goods over long distances].
The station [is the heart of a small town|has two platforms and a clock].
The last train of the day [is nearly empty|goes at midnight].
""",
        """
The driver watches the signals: red means stop, and green means go.
A goods train can be longer than a whole village.
Through the window one sees fields, villages and sometimes a deer.
The conductor checks the tickets and wishes everybody a good journey.
Steel wheels on steel rails roll very easily, so a train needs little power.
In the mountains the line goes through tunnels and over high bridges.
In the dining car there is soup, bread and coffee.
Some people like to sleep in trains, because the sound of the wheels is so even.
At every station some people get off and others get on.
In former times trains were pulled by steam engines, which needed coal and water.
""",
        """
At the end of the line there is the sea.
It arrived exactly on time.
A journey by train is a good time to think.
""",
    ),
    "cooking": _topic(
        """
The best soup [is made from simple things|needs time|tastes even better on the second day].
The secret of good [bread|soup|cooking] is [patience|time|good salt and a slow fire].
The kitchen [is the warmest room of the house|smelled of fresh bread and onions].
Cooking [is easier than it looks|is a kind of play that one can eat].
To make [pancakes|a simple cake], you need flour, eggs and milk.
To make tea, boil fresh water and pour it over the leaves.
A good breakfast [begins with bread and butter|makes the day easier].
""",
        """
First cut the onions and let them turn golden in a little butter.
Add salt at the end, and taste before you add more.
Carrots, potatoes and beans are cheap and good.
Dough needs rest: leave it alone for an hour, and it will rise.
A sharp knife is safer than a blunt one.
A little lemon makes many things taste fresher.
Fresh herbs go in last.
The table should be laid before the soup is hot.
Whoever cooks does not have to wash up.
Old bread can be made into [soup|dumplings|pudding].
Stir it from time to time, so that it does not burn.
""",
        """
Enjoy your meal.
It tastes best with friends.
That is all there is to it.
""",
    ),
    "the sea": _topic(
        """
The sea [is never quite still|was calm that day, and as grey as slate|covers most of the earth|is salty and deep].
The waves [come in, one after the other, and never grow tired|break on the rocks].
The tide comes in twice a day and goes out twice a day.
The lighthouse stands [on the rocks at the end of the land|where the bay meets the open sea].
The harbour is [full of small boats|quiet in the morning].
The island [has one road and two shops|is small, but it has a school, a church and a lighthouse].
""",
        """
Rivers carry a little salt into the sea, and it stays there when the water rises into the clouds.
The moon pulls at the water, and that makes the tides.
In the deepest places it is dark and very cold.
Fishermen go out before sunrise and come back with the tide.
Gulls cry above the nets.
Shells lie on the sand like small white spoons.
A ship that is far away seems to sink behind the horizon, because the earth is round.
Whales travel thousands of miles through it every year.
Every few seconds the beam of the lighthouse goes round.
""",
        """
In the evening it turns to gold.
Whoever has heard it once wants to hear it again.
""",
    ),
    "the sky": _topic(
        """
The moon [travels around the earth in about a month|has no light of its own|rose above the trees].
The stars [are suns that are very far away|are there by day as well, but the sky is too bright to see them].
The earth [turns around itself once a day and around the sun once a year|is the third planet from the sun].
The sky [is blue because air scatters blue light more than red light|turned red in the evening].
The planets travel around the sun, each on its own path.
The sun is a star, and it is so large that the earth would fit into it more than a million times.
""",
        """
Light needs about eight minutes from the sun to the earth.
Mars is red because there is rust in its dust.
Jupiter is the largest of the planets, and Saturn has the most beautiful rings.
Sailors found their way by the stars before they had compasses.
People have walked on the moon, and their footprints are still there.
With a small telescope one can see the mountains of the moon.
A shooting star is a grain of dust that burns up in the air.
When the moon comes between the earth and the sun, it grows dark in the middle of the day.
On a clear night one can see about two thousand stars.
""",
        """
There is still much to discover.
Looking up costs nothing.
""",
    ),
    "trees": _topic(
        """
The tree [in the yard is older than the house|drinks water with its roots and light with its leaves|gives shade in summer and wood in winter].
The forest [is quiet in winter|is home to many animals|begins behind the last house].
The oldest trees of the world are thousands of years old.
The leaves [turn yellow and red in autumn|are small kitchens that work with sunlight].
The apple tree [was white with blossom|bears fruit every second year].
A tree grows a new ring every year.
""",
        """
One can count the rings of a trunk to find out how old the tree was.
Roots hold the earth together, so that the rain does not carry it away.
Squirrels bury acorns, and from those they forget new oaks grow.
Oaks grow slowly and live long, and birches grow quickly.
Mushrooms and trees help each other under the ground.
In spring the buds open, and the birds come back.
Paper, tables, violins and boats are made of wood.
Under old trees it is cool even on the hottest day.
""",
        """
Whoever plants a tree thinks of others.
It will stand there long after us.
""",
    ),
    "the garden": _topic(
        """
The garden [needs water, sun and patience|behind the house was full of beans and roses|is never finished].
The gardener [gets up early|knows every plant by name|waits for the rain].
The best time to plant is [spring|the morning after a rain].
The flowers [open in the morning and close at night|were as bright as a box of paints].
""",
        """
Bees carry pollen from one flower to the next, and without them there would be few apples.
Worms make the earth loose and rich.
Tomatoes like the sun, and salad likes the shade.
Weeds are plants that grow where nobody wants them.
In the evening it is time to water the beds.
Beans climb up anything that you give them.
A hedgehog in the garden is a good friend, because it eats snails.
Seeds should be put into the earth as deep as they are thick, or a little more.
""",
        """
In autumn the baskets were full.
A garden teaches patience.
""",
    ),
    "towns": _topic(
        """
The town [lies between the river and the hills|wakes up slowly on Sundays|has a market on {weekday}].
The city [never sleeps|is built on seven hills|is large, but every street is like a village].
The village [has one shop, one school and many cats|lies at the end of a long valley].
The market [opens at six|is loud and full of colours].
The library [is open until the evening|has more books than anyone can read].
The museum [shows old ships and older clocks|is closed on {weekday}].
The bridge [is older than the town|joins the two halves of the town].
The school [is a yellow house beside the church|begins at eight].
The street [is narrow and full of bicycles|leads down to the harbour].
The house [at the corner has green shutters|on the hill has been empty for years|has three rooms and a large kitchen].
The people [of the town like to talk about the weather|here are friendly, but they do not say much].
""",
        """
The baker is the first to get up, and the night watchman is the last to go to bed.
In the morning one hears the bells, and in the evening the music from the open windows.
On the square there is a fountain, where the children play in summer.
Most people go on foot, because nothing is far away.
There is a small café where one can sit for hours with one cup of coffee.
Every {weekday} the farmers sell cheese, honey and eggs.
The tram goes from the station to the harbour in ten minutes.
In the evening the lamps are lit one after the other.
An old clock on the tower is always five minutes slow, and everybody knows it.
The postman knows everybody, and everybody knows the postman.
From the hill one can see all the roofs.
""",
        """
It is a good place to live.
Strangers come for a day and stay for a year.
""",
    ),
    "music": _topic(
        """
Music is [a language that needs no words|older than writing].
The song [was short, but nobody forgot it|has only five notes].
The violin has four strings, and it [is not easy to play|can laugh and cry].
The orchestra plays together because everybody listens.
""",
        """
A drum gives the beat, and the others follow.
High notes come from short strings, and low notes from long ones.
Whoever wants to play well has to practise a little every day.
Children learn songs long before they learn to read.
The flute is one of the oldest instruments of the world.
A choir needs high voices and low ones.
Silence is a part of music, too.
Even the shortest melody can stay with us for years.
""",
        """
In the end everybody sang along.
Then it was quiet.
""",
    ),
    "books": _topic(
        """
The book [lay open on the table|begins with a storm|has two hundred pages and no pictures].
A good book [is a friend who waits|can be read twice].
Reading is [like travelling without a suitcase|a quiet adventure].
The story [begins in a small village|has a happy end|is older than the house in which it was told].
The best stories are [simple|told in the evening|those that one can tell again].
""",
        """
In a library one may borrow more stories than one can carry.
Some readers begin with the last page, and they should be ashamed of it.
In former times books were written by hand, and one book took a year.
The printing press made books cheap, and then many people learned to read.
A dictionary is a book in which all words live next to each other.
Whoever reads much finds it easier to write.
A bookmark remembers where we stopped.
""",
        """
One more chapter, and then it is time to sleep.
Some books one never forgets.
""",
    ),
    "clocks": _topic(
        """
The clock [on the wall ticks louder at night|struck nine|has two hands, a short one and a long one].
Time [goes slowly for those who wait and fast for those who play|cannot be stored in a box].
An hour has sixty minutes, and a minute has sixty seconds.
The clockmaker [works with a magnifying glass|can hear when something is wrong].
""",
        """
The first clocks had no hands, only a shadow.
A day has twenty-four hours, and a week has seven days.
When it is noon here, it is midnight on the other side of the earth.
A pendulum swings to and fro, always in the same time.
Every fourth year has one day more, the twenty-ninth of February.
Sand in a glass can measure a few minutes, and that is enough for an egg.
Railways needed clocks that agreed with each other.
""",
        """
Better late than never.
And the next hour has begun already.
""",
    ),
    "bicycles": _topic(
        """
The bicycle is [one of the simplest and best machines|quiet, cheap and quick].
The wheel [was invented thousands of years ago|turns, and the road goes by].
A bicycle has two wheels, a chain and a bell.
""",
        """
Whoever has learned to ride never forgets it.
A chain carries the power from the pedals to the back wheel.
Uphill it is hard work, and downhill it is a pleasure.
A little oil makes it quiet again.
In the dark one needs a lamp at the front and a red one at the back.
With a basket it can carry a cat, a loaf of bread or a library book.
""",
        """
The best view is the one from the saddle.
It needs no stable and no hay.
""",
    ),
    "friendship": _topic(
        """
A friend is [somebody who knows you and likes you all the same|worth more than gold].
The best friends [do not have to talk all the time|tell each other the truth].
Friendship [needs time|grows slowly, like a tree].
The most important thing is [to listen|to be kind|not to give up|to have somebody to come home to].
The meaning of life is [a large question for a small model|perhaps to be kind and curious|different for everyone].
Love is [patient|hard to explain, but easy to recognise].
Happiness is [often found in small things|a warm room, a good book and somebody to share it with].
""",
        """
Whoever shares a joy has two of them.
One can quarrel with a friend and still be friends the next day.
A kind word costs nothing.
It is good to say thank you, and it is even better to mean it.
Nobody is perfect, and that is a comfort.
Asking for help is not a weakness.
A small gift at the right time can change a whole day.
""",
        """
That is how it is.
Everything else is less important.
""",
    ),
    "science": _topic(
        """
Science [begins with a question|is a way of not fooling oneself].
The experiment [failed, and that was interesting|was repeated three times].
Water [freezes at zero degrees and boils at a hundred|is made of hydrogen and oxygen].
Light [travels faster than anything else|goes straight on until something stops it].
Electricity [makes lamps shine and motors turn|comes from the wall, but it begins in a power station].
The scientist [wrote everything down|looked at the result for a long time].
""",
        """
A good question is half of the answer.
What cannot be tested cannot be known for sure.
A magnet has two ends, which are called poles.
Sound needs air or water or something else to travel in, so space is silent.
Ice floats because it is lighter than water.
Heat always flows from the warm to the cold.
A lever makes heavy things light.
Plants turn light into sugar, and animals live on that.
Everything is made of atoms, and they are far too small to be seen.
""",
        """
And then the next question comes.
That is why one should measure twice.
""",
    ),
}
