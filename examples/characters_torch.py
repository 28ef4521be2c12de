"""Learns to write like Python's manual, one character at a time.

Paragraphs differ in length, and the loss is a mean over characters, not over rows. So
it says how many characters it is the mean of, and shards are weighted by that.
"""

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import instep.torch

STEPS, BATCH_SIZE, LONGEST, WIDTH = 250, 32, 64, 96

torch.manual_seed(0)
torch.set_num_threads(1)  # the workers need the cores
paragraphs = [p.strip() for text in topics.values() for p in text.split("\n\n")]
letters = ["\0", *sorted(set("".join(paragraphs)))]  # \0 begins and ends a text
number = {letter: k for k, letter in enumerate(letters)}
texts = [torch.tensor([number[c] for c in f"\0{p}\0"][:LONGEST]) for p in paragraphs]


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(letters), WIDTH)
        self.remember = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.choose = nn.Linear(WIDTH, len(letters))

    def forward(self, text, state=None):
        hidden, state = self.remember(self.embed(text), state)
        return self.choose(hidden), state


def loss(model, text):
    scores, _ = model(text[:, :-1].clamp(min=0))
    mean = nn.functional.cross_entropy(scores.mT, text[:, 1:], ignore_index=-1)
    return instep.Weighted(mean, (text[:, 1:] >= 0).sum())


model = Writer()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
with instep.torch.GradientPool(model, loss, workers=4) as pool:
    for step in range(1, STEPS + 1):
        chosen = [texts[k] for k in torch.randint(len(texts), (BATCH_SIZE,))]
        optimizer.zero_grad()
        value = pool.backward(pad_sequence(chosen, True, padding_value=-1))
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3}  loss {value:.3f}", flush=True)

letter, state = torch.zeros(1, 1, dtype=torch.long), None
with torch.no_grad():
    for _ in range(300):
        scores, state = model(letter, state)
        letter = torch.multinomial(scores[0].div(0.6).softmax(1), 1)
        print(letters[letter] if letter else "\n", end="")
