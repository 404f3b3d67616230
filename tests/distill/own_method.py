"""A user's method: hidden states and attention maps."""

from torch import nn
from torch.nn import functional as F

from fastkd.distill import Method


class HiddenAndAttention(Method):
    def __init__(self, *, hidden=1.0, attention=1.0):
        super().__init__()
        self.hidden, self.attention = hidden, attention

    def choose_layers(self, teacher, student):
        self.pair_layers("uniform", teacher, student)
        self.student_attentions, self.teacher_attentions = self.student_layers, self.teacher_layers

    def make_parts(self, teacher, student):
        self.W = nn.Linear(student.hidden_size, teacher.hidden_size)

    def weights(self, progress):
        return {"states": self.hidden, "maps": self.attention}

    def states(self, step):
        pairs = zip(*step.layers(self.student_layers, self.teacher_layers), strict=True)
        return sum(F.mse_loss(self.W(s[step.real]), t[step.real]) for s, t in pairs)

    def maps(self, step):
        maps = step.attentions(self.student_attentions, self.teacher_attentions)
        real = step.real[:, None, :, None] & step.real[:, None, None, :]
        pairs = zip(*maps, strict=True)
        return sum(((s - t) * real).square().sum() / real.sum() for s, t in pairs)


class Unfinished(Method):
    def __init__(self, alpha=1.0):
        super().__init__()

    def weights(self, progress):
        return {"nothing": 1.0}


not_a_method = dict
