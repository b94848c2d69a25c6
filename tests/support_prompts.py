"""32 real prompts of different lengths, for comparisons on a real model."""

_QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a ten-year-old.",
    "Translate 'good morning' into Spanish, French and German.",
    "What is 17 times 23? Show the steps.",
    "List five uses of a paper clip.",
    "Who wrote Pride and Prejudice, and when was it published?",
    "Give me a short recipe for pancakes.",
    "What causes the seasons on Earth?",
    "Write a polite e-mail that declines a meeting on Friday.",
    "What is the difference between a list and a tuple in Python?",
    "Describe a sunset in two sentences.",
    "How do vaccines work?",
    "Suggest a name for a small bakery next to a river.",
    "Summarise the plot of Romeo and Juliet in three sentences.",
    "What are the first ten prime numbers?",
    "Write a function in Python that reverses a string.",
    "Why is the sky blue?",
    "Give two arguments for and two against working from home.",
    "What does HTTP stand for?",
    "Tell me a joke about computers.",
    "How many continents are there? Name them.",
    "Explain what a hash table is and when to use one.",
    "Write the opening line of a mystery novel.",
    "What should I pack for a week in Norway in winter?",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "What is the meaning of the proverb 'a stitch in time saves nine'?",
]

_PASSAGE = (
    "A message queue lets one service hand work to another without waiting for it. The producer "
    "appends a message and goes on; a worker takes the message when it has room, does the work "
    "and acknowledges it. If the worker dies in between, the message is still there and another "
    "worker takes it. This makes the whole system calmer under load, because a burst of requests "
    "becomes a longer queue instead of a row of errors, and it makes it easier to scale, because "
    "more workers can be started while the queue is long and stopped when it is short. "
)

_LONG = [
    _PASSAGE + "Summarise the passage in one sentence.",
    _PASSAGE * 2 + "Which two advantages does the passage name?",
    _PASSAGE * 3 + "What happens when a worker dies, according to the passage?",
    _PASSAGE * 5 + "Rewrite the passage for a newspaper.",
]

PROMPTS = _QUESTIONS + _LONG
CONVERSATIONS = [
    [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": prompt},
    ]
    for prompt in PROMPTS
]
