"""The model of characters_torch.py as a job file.

instep compare characters_job.py
"""

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import instep

LONGEST, WIDTH = 64, 96

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

    def forward(self, text):
        return self.choose(self.remember(self.embed(text))[0])


def loss(model, text):
    scores = model(text[:, :-1].clamp(min=0))
    mean = nn.functional.cross_entropy(scores.mT, text[:, 1:], ignore_index=-1)
    return instep.Weighted(mean, (text[:, 1:] >= 0).sum())


def job():
    torch.manual_seed(0)
    model = Writer()
    return instep.Job(
        model=model,
        loss=loss,
        data=(pad_sequence(texts, True, padding_value=-1),),
        batch_size=32,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        steps=250,
    )
