"""The words of the language, one token each.

One set of nouns serves as keys, values, nodes of roads and listed words, and as the nouns of the
filler: what a sentence is about tells nothing of whether it will be asked for.
"""

SPECIAL_TOKENS = ("<pad>", "<bos>", "<end>", "<unk>")
PAD, BOS, END, UNKNOWN = range(len(SPECIAL_TOKENS))
MARKS = (".", ",", ":")
GRAMMAR = (
    "the a and of in on by under over behind past all from with while often never once still "
    "call we they some people many it name road list saw found common frequent word "
    "morning evening night winter summer spring autumn day"
)
VERBS = (
    "sleeps waits shines turns falls rises stands grows fades moves rests burns sings floats "
    "breaks drifts listens wanders trembles glows opens closes leans spins melts hums swings "
    "returns begins ends"
)
ADJECTIVES = (
    "old young small large quiet loud dark bright cold warm heavy light narrow wide deep high "
    "empty full slow quick soft hard rough smooth early late green red blue white"
)
NOUNS = (
    "river castle horse bridge mountain garden window door table chair lamp candle mirror clock "
    "ship boat anchor harbor island beach shell stone rock sand wave storm cloud rain snow ice "
    "wind thunder rainbow sun moon star planet comet sky forest tree leaf branch root flower rose "
    "lily tulip daisy grass moss fern vine berry apple pear plum peach cherry grape lemon orange "
    "melon olive onion carrot potato tomato pepper garlic bean pea corn wheat rice bread butter "
    "cheese honey sugar salt spice tea coffee milk juice wine soup cake cookie candy egg fish "
    "salmon trout shark whale dolphin seal otter beaver badger fox wolf bear lion tiger leopard "
    "panther zebra giraffe elephant camel donkey goat sheep lamb pig cow bull deer moose rabbit "
    "hare squirrel mouse rat hedgehog mole bat owl eagle hawk falcon raven crow sparrow robin "
    "swallow pigeon dove swan duck goose turkey rooster parrot penguin spider ant bee wasp beetle "
    "moth butterfly cricket snail worm frog toad turtle lizard snake dragon wizard knight king "
    "queen prince baron bishop monk priest nun judge lawyer doctor nurse teacher student pilot "
    "sailor soldier captain hunter farmer miller baker butcher tailor weaver potter mason "
    "carpenter painter poet singer dancer actor clown juggler merchant banker jeweler barber cook "
    "waiter gardener shepherd fisher guard thief beggar pirate hammer nail axe shovel "
    "rake hoe plow wheel cart wagon carriage saddle bridle rope chain hook net basket barrel "
    "bucket bottle cup bowl plate fork spoon knife kettle oven stove pan pot broom brush comb soap "
    "towel blanket pillow carpet curtain drawer shelf cabinet chest box bag purse coin crown ring "
    "necklace bracelet button needle thread cloth silk wool cotton leather velvet ribbon hat cap "
    "coat cloak shirt dress skirt belt boot shoe sandal glove scarf sword shield spear arrow bow "
    "dagger helmet armor banner drum flute violin harp trumpet bell piano guitar book page letter "
    "paper pen ink map globe compass telescope lens prism magnet engine piston lever pulley tower "
    "wall gate fence arch column temple chapel abbey palace cottage cabin barn stable market "
    "school library museum theater prison hospital station tunnel canal valley hill cave desert "
    "meadow swamp lake pond waterfall glacier volcano canyon cliff"
)


def token_names() -> tuple[str, ...]:
    """Return the text of every token in the bundled model's vocabulary, in the order of ids."""
    return (
        *SPECIAL_TOKENS,
        *MARKS,
        *GRAMMAR.split(),
        *VERBS.split(),
        *ADJECTIVES.split(),
        *NOUN_LIST,
    )


NOUN_LIST = tuple(word for word in NOUNS.split())
TOKEN_IDS = {name: index for index, name in enumerate(token_names())}
