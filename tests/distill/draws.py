"""Random steps of a Distiller against the same loss by hand: each text alone, without padding.

    python -c "from tests.distill.draws import failure; print(failure(7))"

A seed draws two models, what a user changed in them, a method with its options, texts, labels, how
the texts are laid out in a batch (padded on either side, packed, cut into micro-batches), and where
the teacher's outputs come from. By hand both models read one text after another; the terms are the
public losses of the hidden states, attention maps and logits that transformers returns, or the
paper's equation where no public loss has it. Loss, terms, logits, the gradients of student and
method, and the number of items are compared in float64.
"""

import contextlib
import copy
import functools
import itertools
import math
import random
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import accelerate
import peft
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import BertTokenizer

import fastkd
from fastkd import TopK, VocabularyMatch, distill, layer_norm_mse, relation_loss, soft_target_loss
from fastkd.analysis import similarity
from fastkd.distill import FCD, LRCBERT, AttentionMSE, Distiller, IntraClassKNN, SoftTargets
from fastkd.distill.attention_relations import MiniLM, MiniLMv2
from fastkd.distill.baselines import GOLD, PKD, DistilBERT, Embeddings
from fastkd.distill.methods import Labels
from fastkd.distill.verify import gradients_of, taken
from fastkd.models.backbone import Backbone
from fastkd.models.hooks import Offload
from tests.distill.models import eager, set_dropout, with_noise
from tests.distill.support import model_of
from tests.support.gathered import run_threads

# Seeds of steps that failed once: every run begins with them.
FOUND: tuple[int, ...] = ()

KINDS = [
    ("bert", "none"), ("bert", "sequence"), ("bert", "answers"), ("bert", "choices"),
    ("bert", "masked words"), ("roberta", "sequence"), ("roberta", "masked words"),
    ("distilbert", "tokens"), ("electra", "sequence"), ("albert", "sequence"),
    ("deberta_v2", "tokens"), ("xlnet", "sequence"), ("mpnet", "answers"), ("gpt2", "sequence"),
    ("gpt2", "next word"), ("gpt2", "none"), ("llama", "next word"), ("llama", "tokens"),
    ("opt", "next word"), ("bloom", "next word"), ("gemma2", "next word"),
    ("modernbert", "masked words"), ("t5", "written words"), ("bart", "written words"),
    ("bart", "sequence"),
]  # fmt: skip
PACKED = ("position_ids", "segments", "seq_idx", "cu_seq_lens", "padded", "padded")
PACKABLE = {"gpt2", "llama", "gemma2"}
CUT = {"bert", "roberta", "gpt2", "llama", "t5"}  # narrower students
OTHERS = {"bert": "roberta", "roberta": "distilbert", "gpt2": "llama", "electra": "bert"}
# Heads that read the last token, and models with float32 inside.
READ_LAST = {"gpt2", "llama", "opt", "bloom", "gemma2", "xlnet", "bart", "t5"}
ROUNDED, RELU = {"llama", "gemma2", "t5", "bloom", "modernbert", "opt"}, {"opt", "t5"}
TYPED = {"bert", "electra", "albert", "xlnet"}  # that read segments
OF_TOKENS = ("tokens", "masked words", "next word", "written words")
V = 60
# Names of the modules that give queries, keys and values; GPT-2's gives all three.
QKV = {
    "query", "key", "value", "q_lin", "k_lin", "v_lin", "q_proj", "k_proj", "v_proj", "query_proj",
    "key_proj", "value_proj", "c_attn",
}  # fmt: skip
SHOW_QKV = {"bert", "roberta", "distilbert", "electra", "deberta_v2", "gpt2", "llama"}
READ_QKV = ("minilm", "minilmv2")
# Methods that compare no layers but the last, and linear maps that get adapters.
LAST = ("labels", "soft_targets", "knn", "lrkd", "distilbert", "embeddings", "gold")
LORA = {"bert": ["query"], "roberta": ["value"], "gpt2": ["c_attn"], "llama": ["q_proj"]}
TYPES = {"decisions": "multi_label_classification", "shares": "single_label_classification"}


@dataclass
class Text:
    """A text with its labels; ``teacher``: other tokens that the teacher reads."""

    ids: Tensor  # (n,), of a question (choices, n)
    labels: Any = None  # (n,) of tokens, (m,) of a decoder, a scalar, (V,), or a pair of positions
    weights: Tensor | None = None  # (n,)
    read: int = -1  # the token that a head reads which doesn't read the first
    decoder: Tensor | None = None  # (m,) of a decoder, if not the words before the labels
    teacher: Tensor | None = None
    real: Tensor | None = None  # (n,), with masked tokens between others
    spans: tuple[Tensor, Tensor] | None = None  # of its tokens and the teacher's, −1 for none
    types: Tensor | None = None  # (n,) segment of each token, in models that read it


@dataclass
class Run:
    """Outputs of a model that reads texts one after another, each (B, longest, ...)."""

    hidden: list[Tensor]
    maps: list[Tensor]
    logits: list[Any]  # of each text
    mask: Tensor  # (B, N)
    qkv: list[list[Tensor]]  # of each layer, (B, N, width)


def padded(rows: Sequence[Tensor], length: int, value: Any = 0) -> Tensor:
    """Tensors (n, ...) in one, with ``value`` behind."""
    return torch.stack([
        torch.cat([x, x.new_full((length - len(x), *x.shape[1:]), value)]) for x in rows
    ])  # fmt: skip


class Step:
    """One drawn step."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        kind, self.name = PAIRS[seed % len(PAIRS)]
        self.family, self.head = kind
        self.per_token = self.head in OF_TOKENS
        self.draw_models()
        torch.manual_seed(seed)  # after models that are made once
        self.chosen: list[int] = []  # layers that MC3KD chooses from data
        self.hand = METHODS[self.name](self)
        self.draw_texts()
        self.draw_layout()
        self.draw_form()

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def number(self, low: float = 0.3, high: float = 2.0) -> float:
        return round(self.random.uniform(low, high), 2)

    def weight(self) -> float:
        return self.pick(0.0, self.number(), self.number())

    # What is drawn

    def draw_models(self) -> None:
        self.problem = None
        if self.head == "sequence":
            self.problem = self.pick("classes", "classes", "numbers", "decisions", "shares")
        if self.name == "knn" and self.problem == "decisions":
            self.problem = "classes"
        alike = self.name in ("pkd", "distilbert")
        width = 8 if self.family in CUT and not alike and self.chance(0.25) else 16
        given = self.head, self.problem == "numbers"
        self.student = student_of(self.family, *given, width)
        other = OTHERS.get(self.family)
        if other is None or self.name == "minilm" or self.head == "choices" or not self.chance(0.2):
            other = self.family
        self.sides = self.family in READ_LAST, other in READ_LAST
        self.alike = other == self.family
        words = self.head in ("masked words", "next word") and other in ("bert", "gpt2", "llama")
        self.wide = words and self.chance(0.25)
        words &= self.name not in ("gold", "several")
        self.shared = 50 if words and self.chance(0.3) else V  # tokens of both tokenizers
        self.apart = self.name == "several" and self.chance(0.5)  # a teacher of each method
        self.teachers = [teacher_of(other, *given, wide=self.wide)]
        narrow = self.name == "soft_targets" and other in CUT and self.chance(0.5)
        if self.apart or self.chance(0.4 if self.name == "soft_targets" else 0.15):
            self.teachers.append(teacher_of(other, *given, 1, self.wide, narrow))
        self.student, *self.teachers = copy.deepcopy([self.student, *self.teachers])
        if self.name == "attention":
            eager([self.student, *self.teachers])
        # Whose configuration says that labels are decisions; their type does, too.
        inferred = self.problem == "decisions"
        self.typed = self.pick("both", "teacher", "teacher", "none") if inferred else "both"
        for model in (self.student, *self.teachers):
            known = self.typed == "both" or (self.typed == "teacher" and model is not self.student)
            model.config.problem_type = TYPES.get(self.problem) if known else None
        # An own start of the positions, in models that read them.
        reads = other == self.family in ("bert", "gpt2") and self.head != "choices"
        self.start = self.pick(0, 3) if reads and self.chance(0.3) else None
        self.tuples = self.family == "bert" and self.chance(0.2)
        self.verbose = self.chance(0.15)
        for model in (self.student, *self.teachers):
            model.config.return_dict = not self.tuples
            model.config.output_hidden_states = self.verbose

    def draw_form(self) -> None:
        """Models that a user changed, parameters that don't learn, and a teacher of the student."""
        forms = ["", "", "", "frozen block", "offloaded"]
        # A cache and GOLD read the weights outside of a pass; DeBERTa's functions are compiled.
        if not self.stored and self.name != "gold" and self.family != "deberta_v2":
            forms += ["offloaded by accelerate", "offloaded to a disk"]
        if not self.embedded:  # what a batch has is of one dtype
            forms += ["float32 student", "float32 teachers", "autocast"]
        # Rounding changes the order of probabilities and the side of a ReLU: other subgradients.
        self.kinks = self.name == "gold" or self.unmatched == "sorted" or self.family in RELU
        words = self.head in ("masked words", "next word") and self.name != "gold"
        if words and not (self.tuples or self.top_k):
            forms += ["halved output", "halved layer"]
        forms += ["checkpointing"] * bool(self.student.supports_gradient_checkpointing)
        forms += ["adapters"] * (self.family in LORA)
        same = len(self.teachers) == 1 and not (self.stored or self.wide) and self.shared == V
        same &= self.typed == "both" and self.alike and self.name in LAST
        if same:
            forms += ["average"] + 3 * ["adapters of the teacher"] * (self.family in LORA)
        self.form = self.pick(*forms)
        models = self.student, *self.teachers
        if self.form == "frozen block":
            Backbone(self.student).blocks[0].requires_grad_(False)
        elif self.form == "checkpointing":
            self.student.gradient_checkpointing_enable()
        elif self.form == "autocast" or self.form.startswith("float32"):
            some = {"float32 student": models[:1], "autocast": models}
            for model in some.get(self.form, self.teachers):
                model.float()
        elif self.form.startswith("halved"):
            for model in models:
                layer = model if self.form == "halved output" else model.get_output_embeddings()
                layer.register_forward_hook(lambda module, args, out: halved(out))
        elif self.form.startswith("adapters"):
            given = {"target_modules": LORA[self.family], "fan_in_fan_out": self.family == "gpt2"}
            config, base = peft.LoraConfig(r=2, init_lora_weights=False, **given), self.student
            self.student = peft.get_peft_model(base, config).double()
            if self.form == "adapters of the teacher":
                self.teachers = [base]
        elif self.form == "average":
            self.average = distill.EMATeacher(self.student, 0.5)
            self.teachers = [self.average.model]
            with_noise(self.average.model, 0.1)

    def draw_texts(self) -> None:
        causal, head = self.head == "next word", self.head
        if "soft" not in self.hand.weights:
            self.shared = V  # tokenizers are compared for soft targets alone
        # How the predictions of another tokenizer are compared.
        reads = self.name in ("soft_targets", "fcd") and "soft" in self.hand.weights
        plain = reads and causal and self.family in CUT and not self.wide and self.shared == V
        self.pairs = self.pick("equal", "equal", "match") if plain else ""
        self.layout = self.pick("none", "right", "left", "left", "right")
        if self.name == "gold":
            self.pairs = "match"
            del self.teachers[1:]
        if self.pairs:
            self.layout = self.pick("left", "right")
        elif self.family in PACKABLE and head != "sequence" and self.chance(0.5):
            self.layout = self.pick(*PACKED)
            if self.layout == "cu_seq_lens" or not self.per_token:  # labels of no one row
                del self.teachers[1 + self.apart :]
        if self.family == "xlnet":
            self.layout = self.pick("none", "left")
        lengths = [self.random.randint(2, 7) for _ in range(self.random.randint(2, 6))]
        if self.layout == "none":
            lengths = [max(lengths)] * len(lengths)
        needs = self.hand.needs_labels or self.typed == "none"
        self.labelled = head != "none" and (needs or self.chance(0.8))
        weigh = self.labelled and head in ("masked words", "next word", "tokens")
        self.weighed = weigh and self.chance(0.3)
        self.weight_dtype = self.pick(torch.float64, torch.float32, torch.bfloat16)
        self.decoder = self.pick("", "shifted", "own") if head == "written words" else ""
        self.own = (
            self.name not in ("attention", "several", *READ_QKV) and head in ("none", "sequence")
            and self.family != "bart" and self.layout in ("left", "right") and self.chance(0.3)
        )  # fmt: skip
        self.spans = self.own and (not self.hand.pooled or self.chance(0.5))
        self.match, self.unmatched = None, ""
        if self.pairs:
            self.own = self.spans = True
            self.labelled |= self.pairs == "equal"
        if self.pairs == "match":
            ids = (torch.tensor(self.random.sample(range(V), 40)) for _ in range(2))
            self.match = VocabularyMatch(*ids, V, V + 4 * self.wide)
            self.unmatched = self.pick("renormalise", "bucket", "sorted")
        if self.own or self.layout in PACKED:
            self.start = None
        plain = not self.own and head not in ("answers", "choices", "written words")
        plain &= self.family != "deberta_v2"  # whose masked tokens read padding
        self.holes = plain and self.layout not in PACKED and self.chance(0.2)
        typed = self.alike and self.family in TYPED and not self.own
        self.segmented = typed and self.chance(0.3)
        self.nothing = self.chance(0.1)  # no token has a label
        self.integers = self.chance(0.5)  # as labels of a regression
        self.texts = [self.text(n, causal) for n in lengths]
        if head == "none" and self.hand.needs_labels:
            for text in self.texts:
                text.labels = torch.tensor(self.random.randrange(3))
        self.teacher_ids = [self.random.randrange(len(self.teachers)) for _ in lengths]

    def text(self, n: int, causal: bool) -> Text:
        text = Text(torch.randint(5, V, (3, n) if self.head == "choices" else (n,)))
        if self.family == "bart" and self.head == "sequence":  # which reads the end
            text.read = self.pick(-1, -2)
            text.ids[text.read] = 2
        if self.family in ("gpt2", "llama") and self.head == "sequence" and self.chance(0.3):
            text.ids[-1], text.read = 0, -2  # padding ends a text, whatever the mask says
        if self.holes:
            text.real = torch.arange(n) != (self.random.randrange(1, n - 2) if n > 3 else n)
        if self.segmented:
            text.types = torch.randint(2, text.ids.shape)
        if self.own:
            text.teacher = torch.randint(5, V, (self.random.randint(2, 7),))
        if self.spans:
            last = self.random.randint(0, 2)
            drawn = (torch.randint(-1, last + 1, (len(x),)) for x in (text.ids, text.teacher))
            text.spans = tuple(x.sort().values for x in drawn)
        if self.pairs == "equal":  # the same tokens after another beginning
            a, b = self.random.randrange(n), self.random.randint(0, 3)
            text.teacher = torch.cat([torch.randint(5, V, (b,)), text.ids[a:]])
            both = torch.arange(n) - a, torch.arange(n - a + b) - b
            text.spans = tuple(x.clamp(min=-1) for x in both)
        m = self.random.randint(2, 5) if self.head == "written words" else n
        if self.per_token:
            classes = 3 if self.head == "tokens" else self.shared
            text.labels = torch.randint(5, V, (m,)) % classes
            if self.head != "written words":
                share = 0.0 if self.nothing else 0.7
                text.labels = text.labels.where(torch.rand(m) < share, -100)
            elif m > 2:
                text.labels[1] = -100
            if self.decoder == "own":
                text.decoder = torch.randint(5, V, (m,))
        elif self.problem == "numbers":
            number = self.number(0, 5)
            number = int(number) if self.integers else self.pick(math.nan, number)
            text.labels = torch.tensor(number)
        elif self.problem == "decisions":
            text.labels = torch.tensor([self.pick(0.0, 1.0, math.nan, -100.0) for _ in range(3)])
        elif self.problem == "shares":
            text.labels = torch.rand(3).double().softmax(-1) * self.pick(1.0, 1.0, math.nan)
        elif self.head == "answers":
            ends = self.random.randrange(n), self.random.randrange(n)
            text.labels = torch.tensor(self.pick(ends, ends, (-100, ends[1]), (ends[0], 99)))
        else:
            text.labels = torch.tensor(self.pick(0, 1, 2, 2, -100))
        if self.weighed:
            text.weights = torch.randn(n).to(self.weight_dtype) * self.pick(0, 1, 1)
        if not self.labelled and self.head != "written words":
            text.labels = None
        return text

    def draw_layout(self) -> None:
        self.cuts = [0, len(self.texts)]
        self.parts = self.chance(0.4)
        if self.parts:
            inner = {self.random.randrange(1, len(self.texts)) for _ in range(2)}
            self.cuts[1:1] = sorted(inner)
        self.spread = self.parts and self.chance(0.3)  # over processes
        self.junk = 0 if self.family in ("gpt2", "llama", "bart", "xlnet") else self.pick(0, 7)
        self.extra = self.random.randint(0, 2) if self.layout in ("left", "right") else 0
        # Labels may be padded on either side, if no inputs of the decoder belong to them.
        self.front = self.layout == "left"
        if self.head == "written words":
            self.front = self.decoder != "shifted" and self.chance(0.5)
        self.keep_logits = self.name != "gold" and self.chance(0.4)
        self.trains = self.chance(0.2)  # a loop sets the teachers' mode, too
        whole = not self.parts and self.per_token and self.head != "written words"
        self.num_items = self.number(2, 9) if whole and self.chance(0.3) else None
        if self.num_items and self.nothing and self.labelled:
            self.num_items = 0
        known = not self.wide or self.shared < V  # what the heads share, without the teacher
        known &= self.start is None or self.layout != "none"  # a mask is part of the key
        known &= len({x.config.hidden_size for x in self.teachers}) == 1  # by one method
        self.stored = self.name not in ("attention", *READ_QKV) and known and not self.spread
        self.stored &= self.chance(0.5 if self.pairs or self.shared < V else 0.3)
        words = self.name == "soft_targets" and self.head in ("masked words", "next word")
        words &= self.stored and "soft" in self.hand.weights and self.pairs != "match"
        self.top_k = 5 if words and self.chance(0.5) else None
        models = self.student, *self.teachers
        kinds = {(x.config.model_type, x.config.hidden_size) for x in models}
        self.embedded = (  # the table's rows are given in place of ids
            self.per_token and self.head != "written words" and self.name not in ("knn", "gold")
            and not (self.own or self.stored or self.hand.perturb or self.layout in PACKED)
            and kinds == {(self.student.config.model_type, 16)} and self.chance(0.2)
        )  # fmt: skip

    # The Distiller's side

    def batch(self, first: int, stop: int, layout: str) -> dict[str, Any]:
        """Arguments of a Distiller for some of the texts."""
        texts, written = self.texts[first:stop], self.head == "written words"
        if layout in PACKED:
            return self.packed(texts, layout, first)
        masks = [x.real.long() for x in texts] if self.holes else None
        data = self.side([x.ids for x in texts], layout, masks)
        length = data["input_ids"].shape[-1]
        left = layout == "left"
        if self.embedded:
            data["inputs_embeds"] = self.embed(data.pop("input_ids"))
        if texts[0].teacher is not None:
            its = layout if self.family == "xlnet" else self.pick("left", "right")
            own = self.side([x.teacher for x in texts], its)
            data |= {f"teacher_{name}": x for name, x in own.items()}
        if self.spans:
            for number, name in enumerate(("student_spans", "teacher_spans")):
                at = left if number == 0 else its == "left"
                N = data["input_ids" if number == 0 else "teacher_input_ids"].shape[1]
                data[name] = self.rows([x.spans[number] for x in texts], N, -1, at)
        if texts[0].labels is not None and self.head == "answers":
            starts = torch.tensor([length - len(x.ids) if left else 0 for x in texts])
            both = torch.stack([x.labels for x in texts])
            ends = torch.tensor([len(x.ids) for x in texts])[:, None]  # no token of the text
            both = torch.where(both == 99, ends, both)
            kept = both <= 0 if self.chance(0.3) else both < 0  # a row's first place is its 0, too
            both = torch.where(kept, both, both + starts[:, None])
            data |= {"start_positions": both[:, 0], "end_positions": both[:, 1]}
        elif texts[0].labels is not None and self.per_token:
            size = max(len(x.labels) for x in texts) if written else length
            front = self.front if written else left
            behind = self.pick(-100, 7) if self.decoder == "own" else -100  # its mask is 0 there
            data["labels"] = self.rows([x.labels for x in texts], size, behind, front)
        elif texts[0].labels is not None:
            data["labels"] = torch.stack([x.labels for x in texts])
        if self.decoder == "own":
            both = [x.decoder for x in texts]
            data["decoder_input_ids"] = self.rows(both, size, 7, self.front)
        if self.decoder == "own" or (self.head == "written words" and self.chance(0.5)):
            ones = [torch.ones_like(x.labels) for x in texts]
            data["decoder_attention_mask"] = self.rows(ones, size, 0, self.front)
        if self.decoder == "shifted":  # and whatever a decoder reads behind the labels
            read = self.student.prepare_decoder_input_ids_from_labels(labels=data["labels"])
            behind = torch.arange(size) >= torch.tensor([[len(x.labels)] for x in texts])
            data["decoder_input_ids"] = torch.where(behind, 7, read)
        if self.weighed:
            data["loss_weights"] = self.rows([x.weights for x in texts], length, math.nan, left)
        data |= self.places(texts, length, layout)
        if len(self.teachers) > 1 and not self.apart:
            numbers = self.teacher_ids[first:stop]
            data["teacher_id"] = self.pick(torch.tensor(numbers), ["ab"[i] for i in numbers])
        return data

    def places(self, texts: list[Text], length: int, layout: str) -> dict[str, Tensor]:
        """Segments and positions of the tokens, where a user passes them."""
        data = {}
        if self.segmented:
            types = self.side([x.types for x in texts], layout)["input_ids"]
            data["token_type_ids"] = torch.where(types > 1, 1, types)  # whatever padding has
        if self.start is not None:
            positions = [self.start + torch.arange(len(x.ids)) for x in texts]
            data["position_ids"] = self.rows(positions, length, self.pick(0, 1), layout == "left")
        return data

    def embed(self, ids: Tensor) -> Tensor:
        return self.student.get_input_embeddings()(ids).detach()

    def rows(self, rows: list[Tensor], length: int, value: Any, left: bool) -> Tensor:
        if left:
            return padded([x.flip(0) for x in rows], length, value).flip(1)
        return padded(rows, length, value)

    def side(self, ids: list[Tensor], layout: str, masks: Any = None) -> dict[str, Tensor]:
        left, length = layout == "left", max(x.shape[-1] for x in ids) + self.extra
        rows = [x.mT if x.dim() == 2 else x for x in ids]
        mask = self.rows(masks or [torch.ones_like(x) for x in rows], length, 0, left)
        found = self.rows(rows, length, self.junk, left)
        if ids[0].dim() == 2:
            found, mask = found.mT.contiguous(), mask.mT.contiguous()
        data = {"input_ids": found}
        if layout != "none" or self.holes or self.chance(0.5):
            as_bool = self.family not in ("deberta_v2", "xlnet") and self.chance(0.5)
            data["attention_mask"] = mask.bool() if as_bool else mask
        return data

    def packed(self, texts: list[Text], layout: str, first: int) -> dict[str, Any]:
        """Texts in one row, or with a mask in two, of which one may be padded; a teacher each."""
        cut = len(texts) // 2 if layout == "padded" else 0
        rows = [x for x in (texts[:cut], texts[cut:]) if x]
        left = layout == "padded" and self.chance(0.5)
        # The first text may start anywhere behind padding, if angles are relative.
        start = 0 if not left or self.stored or self.family == "gpt2" else self.pick(0, 1, 3)
        found = []
        for row in rows:
            sizes = torch.tensor([len(x.ids) for x in row])
            data = {"input_ids": torch.cat([x.ids for x in row])}
            data["position_ids"] = torch.cat([torch.arange(n) for n in sizes.tolist()])
            data["position_ids"][: sizes[0]] += start
            if layout in ("segments", "seq_idx"):
                data[layout] = torch.arange(len(sizes)).repeat_interleave(sizes)
            if layout == "padded":
                data["attention_mask"] = torch.ones_like(data["input_ids"])
            if self.per_token and row[0].labels is not None:
                data["labels"] = torch.cat([x.labels for x in row])
            if self.weighed:
                data["loss_weights"] = torch.cat([x.weights for x in row])
            found.append(data)
        N = max(len(x["input_ids"]) for x in found)
        behind = {"labels": -100, "loss_weights": math.nan}
        given = {n: self.rows([x[n] for x in found], N, behind.get(n, 0), left) for n in found[0]}
        if layout == "cu_seq_lens":
            given["cu_seq_lens_q"] = F.pad(sizes.cumsum(0), (1, 0)).int()
        if not self.per_token and texts[0].labels is not None:
            given["labels"] = torch.stack([x.labels for x in texts])
        if len(self.teachers) > 1 and not self.apart:
            numbers = [self.random.randrange(2) for _ in rows]
            given["teacher_id"], stop = torch.tensor(numbers), first + len(texts)
            each = zip(numbers, rows, strict=True)
            self.teacher_ids[first:stop] = [i for i, row in each for _ in row]
        return given

    def micro_batches(self) -> list[dict[str, Any]]:
        """The batch, or its micro-batches."""
        found = [self.batch(a, b, self.layout) for a, b in itertools.pairwise(self.cuts)]
        if self.num_items is not None:
            items = self.num_items, torch.tensor(self.num_items, dtype=torch.float64)
            found[0]["num_items"] = self.pick(*items)
        return found

    def distiller(self, teacher: Any) -> Distiller:
        options = {"keep_logits": self.keep_logits, "gather": self.spread}
        if self.match is not None:
            options |= {"tokenizers": self.match, "unmatched": self.unmatched}
        if self.shared < V:
            words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(5, self.shared))]
            options["tokenizers"] = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
        made = Distiller(teacher, self.student, self.hand.method, **options)
        made.set_progress(self.hand.progress)
        if self.chosen:
            made.prepare(self.batches)
        if self.trains and self.form != "adapters of the teacher":
            made.teacher.train()
        return made

    def taught(self, teachers: list[Any]) -> Any:
        """What a Distiller takes for one or two teachers."""
        if self.form == "average":
            return self.average
        if len(teachers) == 1:
            return teachers[0]
        return teachers if self.apart else distill.ByRow(dict(zip("ab", teachers, strict=True)))

    # The side by hand

    def run(self, models: list[Any], shifts: list[Any], own: bool = False) -> "Run":
        """Each text alone; ``shifts`` are added to its embeddings, or get them as leaves."""
        hidden, maps, logits, masks, qkv = [], [], [], [], []
        reads_maps, reads_qkv = self.name == "attention", self.name in READ_QKV
        for model, text, shift in zip(models, self.texts, shifts, strict=True):
            prefix = "decoder_" if model.config.is_encoder_decoder else ""
            ids = text.teacher if own and text.teacher is not None else text.ids
            given = {"input_ids": ids[None], "output_hidden_states": True, "return_dict": True}
            if text.real is not None:
                given["attention_mask"] = text.real[None].long()
            if self.head == "written words":
                given["labels"] = text.labels[None]
            if text.types is not None:
                given["token_type_ids"] = text.types[None]
            if text.decoder is not None:
                given["decoder_input_ids"] = text.decoder[None]
            if self.embedded:
                given["inputs_embeds"] = self.embed(given.pop("input_ids"))
            if self.start is not None:
                given["position_ids"] = self.start + torch.arange(len(ids))[None]
            projections = projections_of(model) if reads_qkv else contextlib.nullcontext({})
            with embeddings_of(model, shift), projections as projected:
                out = model(**given, output_attentions=reads_maps)
            states = out[f"{prefix}hidden_states"]
            for choice in range(len(states[0])):
                hidden.append([x[choice].double() for x in states])
                found = out[f"{prefix}attentions"] if reads_maps else []
                maps.append([x[choice].double() for x in found])
                written = self.head == "written words"
                real = torch.ones(len(states[0][0])) > 0 if text.real is None else text.real
                masks.append(text.labels != -100 if written else real)
                qkv.append([[x[choice].double() for x in layer] for layer in projected.values()])
            found = getattr(out, "logits", None)
            if self.head == "answers":
                found = torch.stack([out.start_logits, out.end_logits], 1)
            logits.append(None if found is None else found[0].double())
        N = max(map(len, masks))
        if len({x[0].shape[-1] for x in hidden}) > 1:  # teachers of unlike widths
            hidden = [[]]
        maps = [[F.pad(x, (0, N - x.shape[1]) * 2) for x in text] for text in maps]
        return Run(
            [padded(layer, N) for layer in zip(*hidden, strict=True)],
            [*map(torch.stack, zip(*maps, strict=True))], logits, padded(masks, N, False),
            [[padded(x, N) for x in zip(*layer, strict=True)] for layer in zip(*qkv, strict=True)],
        )  # fmt: skip

    def compared(self, shifts: list[Any]) -> "Compared":
        own = self.form == "adapters of the teacher"
        with torch.no_grad(), self.student.disable_adapter() if own else contextlib.nullcontext():
            taught = [self.teachers[i] for i in self.teacher_ids]
            teacher = self.run(taught, [None] * len(shifts), own=True)
        student = self.run([self.student] * len(shifts), shifts)
        compared = Compared(self, student, teacher)
        if self.apart:
            with torch.no_grad():
                runs = [self.run([t] * len(shifts), [None] * len(shifts)) for t in self.teachers]
            compared.each = [Compared(self, student, run) for run in runs]
        return compared

    def choose_layers(self) -> None:
        """Algorithm 1 of MC3KD: the layers that correlate least with the layer before them."""
        with torch.no_grad():
            run = self.run([self.teachers[0]] * len(self.texts), [None] * len(self.texts), own=True)
        states = [x[run.mask] for x in run.hidden]
        c = [float(similarity(x, y, "svcca")) for x, y in itertools.pairwise(states)]
        order, method = sorted(range(3), key=c.__getitem__), self.hand.method
        found = next(x for x in method.modules() if isinstance(x, distill.MC3KD)).teacher_layers
        expected = sorted(i + 1 for i in order[:2])
        if c[order[2]] - c[order[1]] < 1e-3:  # rounding decides
            expected = found
        self.chosen[:] = expected
        assert found == expected, f"the layers are {found}, not {expected}: {c}"

    def total(self, shifts: list[Any]) -> tuple[Tensor, dict[str, Tensor], "Compared"]:
        compared = self.compared(shifts)
        terms = self.hand.terms(compared)
        loss = sum(self.hand.weights[name] * terms[name] for name in terms)
        return loss, terms, compared

    def by_hand(self) -> tuple[Tensor, dict[str, Tensor], "Compared"]:
        """Loss, terms and outputs; LRC-BERT's perturbation by eqs. 7 and 8."""
        if self.chosen:
            self.choose_layers()
        if not self.hand.perturb:
            return self.total([None] * len(self.texts))
        leaves: list[Any] = [[] for _ in self.texts]
        loss, *_ = self.total(leaves)
        found = torch.autograd.grad(loss, [leaf for [leaf] in leaves])
        whole = torch.stack([g.square().sum() for g in found]).sum().sqrt()
        norms = [whole if self.hand.perturb == "batch" else g.norm() for g in found]
        return self.total([g / n if n > 0 else 0 * g for g, n in zip(found, norms, strict=True)])


@contextlib.contextmanager
def embeddings_of(model: Any, shift: Any) -> Iterator[None]:
    """Context in which ``shift`` is added to the embeddings, or a list gets them as a leaf."""
    base = getattr(model, "get_base_model", lambda: model)().base_model  # without adapters
    module = getattr(base, "embeddings", None) or model.get_input_embeddings()
    calls = []

    def hook(module: Any, args: Any, out: Tensor) -> Tensor:
        calls.append(1)
        if shift is None or len(calls) > 1:  # GPT-2's table is read for token types, too
            return out
        if isinstance(shift, list):
            shift.append(out.detach().requires_grad_())
            return shift[0]
        return out + shift

    with module.register_forward_hook(hook):
        yield


@contextlib.contextmanager
def projections_of(model: Any) -> Iterator[dict[str, list[Tensor]]]:
    """Context that collects queries, keys and values (1, N, width) of each block."""
    found: dict[str, list[Tensor]] = {}
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            block, _, last = name.rpartition(".")

            def hook(_: Any, args: Any, out: Tensor, block: str = block, last: str = last) -> None:
                parts = out.chunk(3, -1) if last == "c_attn" else [out]
                found.setdefault(block, []).extend(parts)

            if last in QKV:
                hooks.enter_context(module.register_forward_hook(hook))
        yield found


def halved(out: Any) -> Any:
    """What a user's model changes in its logits."""
    if isinstance(out, Tensor):
        return out / 2
    out.logits = out.logits / 2
    return out


def leave(self: Offload) -> None:
    """NaN outside of a pass, where an offloaded model is on another device."""
    self.runs -= 1
    for tensor, host in self.stored if not self.runs else ():
        tensor.data = torch.full_like(host, math.nan) if host.is_floating_point() else host


def mapped(projector: Any, x: Tensor) -> Tensor:
    """``x`` in the teacher's space, in float64."""
    if projector is None:
        return x
    bias = None if projector.bias is None else projector.bias.double()
    return F.linear(x, projector.weight.double(), bias)


def paired_rows(t: Tensor, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher's prediction of the only token of each student token's span, NaN without one."""
    rows, paired = t.new_full((len(ours), t.shape[-1]), math.nan), torch.zeros(len(ours)) > 0
    for n, span in enumerate(ours.tolist()):
        at = (theirs == span).nonzero()[:, 0].tolist()
        if span >= 0 and len(at) == 1 and at[0] > 0 and int((ours == span).sum()) == 1:
            rows[n], paired[n] = t[at[0] - 1], True
    return rows, paired


class Compared:
    """Outputs of student and teacher, and the terms that most methods have."""

    def __init__(self, step: Step, student: Run, teacher: Run) -> None:
        self.step, self.s, self.t = step, student, teacher
        self.each = [self, self]  # of each of two methods
        self.cls = {id(x): self.read(x) for x in (student, teacher)}
        if step.spans:
            self.pool_spans()
        self.mask = student.mask
        self.labels = [x.labels for x in step.texts]

    def read(self, run: Run) -> list[int]:
        """Position of the token that a head reads, among the real ones of each text."""
        last, own = self.step.sides[run is self.t], run is self.t and self.step.own
        reads = [-1 if own else x.read for x in self.step.texts]
        return reads if last else [0] * len(run.mask)

    def pool_spans(self) -> None:
        """Hidden states at the token that the head reads, and the means of each span."""
        texts = self.step.texts
        numbers = torch.arange(1 + max(int(x.max()) for text in texts for x in text.spans))[:, None]
        members = [[text.spans[side] == numbers for text in texts] for side in (0, 1)]
        both = [a.any(1) & b.any(1) for a, b in zip(*members, strict=True)]
        for run, where in zip((self.s, self.t), members, strict=True):
            at = self.cls[id(run)]
            for layer, states in enumerate(run.hidden):
                rows = []
                for x, m, real, read in zip(states, where, run.mask, at, strict=True):
                    x, m = x[real], m.double()
                    means = m @ x / m.sum(1, keepdim=True).clamp(min=1)
                    rows.append(torch.cat([x[read][None], means]))
                run.hidden[layer] = torch.stack(rows)
            run.mask = F.pad(torch.stack(both), (1, 0), value=True)
            self.cls[id(run)] = [0] * len(texts)

    def pool(self, how: str, layers: tuple[int, int] = (-1, -1)) -> list[Tensor]:
        """Pooled hidden states (B, D) of a layer of each model."""
        found = []
        for run, layer in zip((self.s, self.t), layers, strict=True):
            rows = [x[real] for x, real in zip(run.hidden[layer], run.mask, strict=True)]
            each = zip(rows, self.cls[id(run)], strict=True)
            found.append(torch.stack([x.mean(0) if how == "mean" else x[at] for x, at in each]))
        return found

    @functools.cached_property
    def predictions(self) -> list[tuple[Tensor, Tensor, Any, Any]]:
        """Student's and teacher's logits, labels and weights of the predictions that count.

        Without a pair of the token the teacher's are NaN.
        """
        z = self.s.logits, self.t.logits
        step, found = self.step, []
        if step.head == "answers":  # start and end; padded, with no probability behind
            length = max(x.shape[1] for x in z[0])
            for end in (0, 1):
                both = [padded([x[end] for x in side], length, -3e4) for side in z]
                y = None if self.labels[0] is None else torch.stack([x[end] for x in self.labels])
                found.append((*both, y, None))
            return found
        if not step.per_token:
            both = [torch.stack(side) for side in z]
            y = None if self.labels[0] is None else torch.stack(self.labels)
            return [(*both, y, None)]
        shift = int(step.head == "next word")
        parts = []
        for s, t, text in zip(*z, step.texts, strict=True):
            y = torch.zeros(len(text.ids), dtype=torch.long) if text.labels is None else text.labels
            w = torch.ones(len(y)).double() if text.weights is None else text.weights.double()
            if step.head in ("masked words", "next word"):
                s, t = (x[..., : step.shared] for x in (s, t))
            if step.pairs:
                t, paired = paired_rows(t, *text.spans)
                y = y if step.pairs == "match" else y.where(paired, -100)
            elif shift:
                t = torch.cat([t[:1], t[:-1]])  # of each token, as after pairing
            known = y[shift:] != -100
            if text.real is not None:  # a masked token predicts nothing, nor is it predicted
                known &= text.real[shift:] & text.real[: len(y) - shift]
            s, t = s[: len(y) - shift], t[shift:]
            parts.append((s[known], t[known], y[shift:][known], w[shift:][known]))
        return [tuple(map(torch.cat, zip(*parts, strict=True)))]

    def mean(self, losses: Tensor, count: int | None = None) -> Tensor:
        if self.step.per_token and self.step.num_items is not None:
            return losses.sum() / (self.step.num_items or 1)
        return losses.sum() / max(1, len(losses) if count is None else count)

    def task(self, tau: float | None = None) -> Tensor:
        """Loss of the labels, softened by ``tau``."""
        means = []
        for z, _, y, w in self.predictions:
            if self.step.problem == "numbers":
                known = ~y.isnan()
                losses = (z[known, 0] - y[known]).square()
            elif self.step.problem == "decisions":
                known = ~y.isnan() & (y != -100)
                z, y = z[known], y[known].double()
                losses = F.binary_cross_entropy_with_logits(z, y, reduction="none")
            else:
                shares = self.step.problem == "shares"
                known = ~y.isnan().any(1) if shares else (y != -100) & (y != 99)
                z, y = z[known], y[known]
                target = y.double() if y.dim() == 2 else F.one_hot(y, z.shape[-1]).double()
                if tau is not None:
                    there = (z > -2e4)[:, None] & (z > -2e4)[:, :, None]
                    soft = (torch.eye(z.shape[-1]).double() / tau).masked_fill(~there, -math.inf)
                    target = (target[:, None] @ soft.softmax(-1).nan_to_num()).squeeze(1)
                losses = -(target * z.log_softmax(-1)).sum(-1)
                losses = losses if w is None else losses * w[known]
            means.append(self.mean(losses))
        return torch.stack(means).mean()

    def soft(self, temperature: float, divergence: str, t2: bool) -> Tensor:
        means = []
        options = {"divergence": divergence, "scale_by_t2": t2, "reduction": "none"}
        for s, t, _, w in self.predictions:
            count, paired = len(s), ~t.isnan().any(-1)
            s, t, w = s[paired], t[paired], None if w is None else w[paired]
            if self.step.problem == "numbers":
                means.append((s - t).square().mean())
                continue
            if self.step.problem == "decisions":
                s, t = (torch.stack([x, 0 * x], -1).flatten(0, 1) for x in (s, t))
            if self.step.top_k:
                top = (t / temperature).log_softmax(-1).topk(self.step.top_k)
                t = TopK(top.indices, top.values)
            if self.step.match is not None:
                options |= {"vocabulary": self.step.match, "unmatched": self.step.unmatched}
            losses = soft_target_loss(s, t, temperature=temperature, **options)
            each = 3 if self.step.problem == "decisions" else 1
            means.append(self.mean(losses if w is None else losses * w, count * each))
        return torch.stack(means).mean()


class Hand:
    """A method, its weights, and its terms by hand.

    ``features``: name → (weight, function of a `Compared`).
    """

    def __init__(
        self, method: distill.Method, features: Any = (), task: float = 0.0, soft: float = 0.0,
        tau: float | None = None, progress: float = 1.0, pooled: bool = False,
        needs_labels: bool = False, perturb: str = "",
    ) -> None:  # fmt: skip
        self.method, self.features, self.tau = method, dict(features), tau
        self.weights = {"task": task, "soft": soft}
        self.weights |= {name: weight for name, (weight, _) in self.features.items()}
        self.weights = {name: weight for name, weight in self.weights.items() if weight}
        self.progress, self.pooled, self.perturb = progress, pooled, perturb
        self.needs_labels = bool(task) or needs_labels

    def terms(self, compared: Compared) -> dict[str, Tensor]:
        m, found = self.method, {}
        for name in self.weights:
            if name == "task":
                found[name] = compared.task(self.tau)
            elif name == "soft":
                found[name] = compared.soft(m.temperature, m.divergence, m.scale_by_t2)
            else:
                found[name] = self.features[name][1](compared)
        return found


def softened(step: Step) -> dict[str, Any]:
    """Options of soft targets."""
    return {
        "temperature": step.number(0.7, 4.0), "scale_by_t2": step.chance(0.5),
        "divergence": step.pick("forward_kl", "forward_kl", "reverse_kl", "adaptive_kl", "js"),
    }  # fmt: skip


def heads(step: Step) -> tuple[float, float]:
    """Weights of task and soft; none without a head."""
    if step.head == "none":
        return 0.0, 0.0
    return step.weight(), step.weight()


def layers_of(step: Step) -> dict[str, Any]:
    step.layers, name = step.pick(([1, 3], "uniform"), ([1, 2], None), ([2, 3], "top"))
    return {"layers": name or step.layers}


def pairs(c: Compared) -> list[tuple[Tensor, Tensor]]:
    return [(c.s.hidden[i], c.t.hidden[j]) for i, j in zip((1, 2), c.step.layers, strict=True)]


def labels(step: Step) -> Hand:
    return Hand(Labels(), task=1.0)


def soft_targets(step: Step) -> Hand:
    alpha = step.pick(1.0, 0.0, step.number(0.1, 0.9))
    return Hand(SoftTargets(alpha=alpha, **softened(step)), task=1 - alpha, soft=alpha)


def fcd(step: Step) -> Hand:
    task, soft = heads(step)
    alpha, beta = step.pick((0.4, 0.2), (1.5, 0.0), (0.0, 0.7))
    kind = {"normalize": step.pick("l2", "layer_norm", "softmax", "none")}
    kind["distance"] = step.pick("pearson", "mse", "kl")
    how = step.pick("mean", "sum")
    method = FCD(alpha=alpha, beta=beta, task_weight=task, soft_weight=soft, layers_reduction=how,
                 **kind, **layers_of(step), **softened(step))  # fmt: skip

    def relations(over: str) -> Any:
        def term(c: Compared) -> Tensor:
            each = [relation_loss(s, t, c.mask, over=over, **kind) for s, t in pairs(c)]
            return sum(each) / (1 if how == "sum" else len(each))

        return term

    terms = {"tokens": (alpha, relations("tokens")), "samples": (beta, relations("samples"))}
    return Hand(method, terms, task, soft)


def knn(step: Step) -> Hand:
    task, soft = heads(step)
    given = {"k": step.pick(1, 2, 3), "reduction": step.pick("sum", "mean")}
    pool, tolerance = step.pick("cls", "cls", "mean", "tokens"), step.pick(0.5, 1.0)
    method = IntraClassKNN(alpha1=0.1, alpha2=soft, alpha3=task, pool=pool, tolerance=tolerance,
                           **given, **softened(step))  # fmt: skip

    def term(c: Compared) -> Tensor:
        if pool == "tokens":
            width = max(x["input_ids"].shape[1] for x in c.step.batches)
            if c.step.layout in PACKED or c.step.spans:
                width = c.mask.shape[1]  # rows of their own
            s, t = (F.pad(x.hidden[-1], (0, 0, 0, width - x.mask.shape[1])) for x in (c.s, c.t))
            real = F.pad(c.mask, (0, width - c.mask.shape[1]))[..., None]
            s = mapped(method.loss.projector, s) * real
            s, t = s.flatten(1), (t * real).flatten(1)
        else:
            s, t = c.pool(pool)
            s = mapped(method.loss.projector, s)
        y = torch.stack(c.labels)
        if y.dim() == 2:
            y = y.argmax(1).where(~y.isnan().any(1), -100)
        near = tolerance if c.step.problem == "numbers" else None
        return fastkd.knn_feature_loss(s, t, y, tolerance=near, **given)

    pooled = pool != "tokens"
    return Hand(method, {"knn": (0.1, term)}, task, soft, pooled=pooled, needs_labels=True)


def lrc_bert(step: Step) -> Hand:
    task, soft = heads(step)
    pool, how = step.pick("tokens", "sequence", "mean"), step.pick("sample", "batch")
    perturb = step.chance(0.4) and step.head not in ("choices", "written words")
    perturb &= step.family not in ("bart", "bloom")
    tau, early = step.number(0.5, 1.5), step.chance(0.3)
    options = softened(step) | {"temperature": tau}
    method = LRCBERT(alpha=0.5, beta=soft, gamma=task, pool=pool, perturb=perturb, perturb_norm=how,
                     first_stage=0.5, **layers_of(step), **options)  # fmt: skip

    def term(c: Compared) -> Tensor:
        losses = []
        for s, t in pairs(c):
            s, mask, real = mapped(method.loss.W, s), c.mask, c.mask[..., None]
            if pool == "sequence":
                s, t, mask = (s * real).flatten(1), (t * real).flatten(1), mask.any(1)
            elif pool == "mean":
                s, t = ((x * real).sum(1) / real.sum(1) for x in (s, t))
                mask = mask.any(1)
            losses.append(fastkd.cos_nce_loss(s, t, mask=mask))
        return sum(losses)

    perturb = how * perturb
    if early:
        return Hand(method, {"cos_nce": (1.0, term)}, progress=0.4, perturb=perturb)
    progress = step.pick(0.5, 1.0)
    return Hand(method, {"cos_nce": (0.5, term)}, task, soft, tau, progress, perturb=perturb)


def mc3kd(step: Step) -> Hand:
    alpha = None if step.head == "none" else step.pick(1.0, 0.0, 0.6)
    pool, ridge, top = step.pick("tokens", "cls", "mean"), step.pick(1e-1, 1e-2), step.pick(None, 3)
    layers = layers_of(step)
    if len(step.teachers) == 1 and step.chance(0.5):
        layers, step.chosen = {"layers": None}, step.layers  # from data: `choose_layers`
    method = distill.MC3KD(alpha=alpha, beta=0.1, memory=0, ridge=ridge, top_k=top, pool=pool,
                   **layers, **softened(step))  # fmt: skip

    def term(c: Compared) -> Tensor:
        losses = []
        for i, j in zip((1, 2), c.step.layers, strict=True):
            if pool == "tokens":
                s, t = c.s.hidden[i][c.mask], c.t.hidden[j][c.mask]
            else:
                s, t = c.pool(pool, (i, j))
            losses.append(fastkd.cca_loss(s[None], t[None], ridge=ridge, top_k=top))
        return sum(losses)

    task, soft = (0.0, 0.0) if alpha is None else (1 - alpha, alpha)
    return Hand(method, {"cca": (0.1, term)}, task, soft, pooled=pool != "tokens")


def lrkd(step: Step) -> Hand:
    alpha = None if step.head == "none" else step.pick(1.0, 0.0, 0.6)
    gamma, how = step.pick(0.3, 0.9), step.pick("mean", "batchmean", "sum")
    form = {"start": step.pick("identity", "random"), "orthogonal": step.chance(0.7)}
    form |= {"projection_layers": step.pick(1, 2), "reduction": how}
    method = distill.LRKD(alpha=alpha, beta=0.7, gamma=gamma, **form, **softened(step))

    def term(c: Compared) -> Tensor:
        s, t = c.pool("mean")
        projections = method.loss.student_projection, method.loss.teacher_projection
        W, U = (x.weight.double() for x in projections)
        losses = (layer_norm_mse(x, y, reduction=how) for x, y in ((s @ W, t), (t @ U, s)))
        return gamma * next(losses) + (1 - gamma) * next(losses)

    task, soft = (0.0, 0.0) if alpha is None else (alpha, 1 - alpha)
    return Hand(method, {"projection": (0.7, term)}, task, soft, pooled=True)


def attention(step: Step) -> Hand:
    task, soft = heads(step)
    how = step.pick("match", "mean") if step.alike else "mean"  # of unlike numbers of heads
    maps, states = step.pick((0.8, 0.5), (1.2, 0.0), (0.0, 0.6))
    weights = {"attention": maps, "hidden": states, "soft_weight": soft, "task_weight": task}
    method = AttentionMSE(**weights, heads=how, **layers_of(step), **softened(step))

    def of_maps(c: Compared) -> Tensor:
        total = 0.0
        for i, j in zip((1, 2), c.step.layers, strict=True):
            each = []
            for s, t, real in zip(c.s.maps[i - 1], c.t.maps[j - 1], c.mask, strict=True):
                s, t = (x[:, real][:, :, real] for x in (s, t))
                s, t = (s, t) if how == "match" else (s.mean(0), t.mean(0))
                each.append((s - t).square().mean())
            total = total + torch.stack(each).mean()
        return total

    def of_states(c: Compared) -> Tensor:
        layers = [(c.s.hidden[0], c.t.hidden[0]), *pairs(c)]  # the embeddings too, eq. 9
        return sum((mapped(method.W, s[c.mask]) - t[c.mask]).square().mean() for s, t in layers)

    return Hand(method, {"maps": (maps, of_maps), "states": (states, of_states)}, task, soft)


def relation_kl(c: Compared, sides: Any, causal: bool = False) -> Tensor:
    """(1 / (A |x|)) Σ_a Σ_t KL(R^T_{a,t} ‖ R^S_{a,t}) of each text; X and Y (B, N, A, d)."""
    losses = []
    for i, real in enumerate(c.mask):
        logs = []
        for x, y in sides:
            x, y = (z[i, real].transpose(0, 1) for z in (x, y))
            scores = x @ y.mT / x.shape[-1] ** 0.5
            later = torch.ones_like(scores).triu(1) > 0
            logs.append(scores.masked_fill(later & causal, -1e30).log_softmax(-1))
        s, t = logs
        losses.append((t.exp() * (t - s)).sum() / s[..., 0].numel())
    return torch.stack(losses).mean()


def minilm(step: Step) -> Hand:
    task, soft = heads(step)
    layer, (at, of_values) = step.pick(None, 2), step.pick((0.5, 2.0), (1.2, 0.0), (0.0, 0.6))
    weights = {"attention": at, "values": of_values, "task_weight": task, "soft_weight": soft}
    method = MiniLM(layer=layer, **weights, **softened(step))

    def qkv(c: Compared) -> list[list[Tensor]]:
        found = []
        for run, model, number in ((c.s, step.student, 2), (c.t, step.teachers[0], layer or 3)):
            own = model.config.hidden_size // model.config.num_attention_heads
            size = getattr(model.config, "head_dim", None) or own
            found.append([x.unflatten(-1, (-1, size)) for x in run.qkv[number - 1]])
        return found

    def maps(c: Compared) -> Tensor:
        pairs = [(q, k.repeat_interleave(q.shape[2] // k.shape[2], 2)) for q, k, _ in qkv(c)]
        return relation_kl(c, pairs, causal=step.family in PACKABLE)

    def values(c: Compared) -> Tensor:
        return relation_kl(c, [(v, v) for *_, v in qkv(c)])

    terms = {"attentions": (at, maps), "value_relations": (of_values, values)}
    return Hand(method, terms, task, soft)


def minilmv2(step: Step) -> Hand:
    task, soft = heads(step)
    layer, count = step.pick(None, 2), step.pick(None, 4)
    weights = {"queries": 0.5, "keys": step.pick(2.0, 0.0), "values": 1.0}
    method = MiniLMv2(relation_heads=count, layer=layer, task_weight=task, soft_weight=soft,
                      **weights, **softened(step))  # fmt: skip

    def term(which: int) -> Any:
        def of(c: Compared) -> Tensor:
            both = c.s.qkv[1][which], c.t.qkv[(layer or 3) - 1][which]
            A = count or min(8, math.gcd(*(x.shape[-1] for x in both)))  # `most`
            return relation_kl(c, [(x.unflatten(-1, (A, -1)),) * 2 for x in both])

        return of

    names = "query_relations", "key_relations", "value_relations"
    terms = {n: (w, term(i)) for i, (n, w) in enumerate(zip(names, weights.values(), strict=True))}
    return Hand(method, terms, task, soft)


def pkd(step: Step) -> Hand:
    alpha = step.pick(1.0, 0.0, 0.6)
    method = PKD(alpha=alpha, beta=2.0, **layers_of(step), **softened(step))

    def term(c: Compared) -> Tensor:  # the last layer is not compared
        s, t = c.pool("cls", (1, c.step.layers[0]))
        return (F.normalize(s, dim=-1) - F.normalize(t, dim=-1)).square().sum(-1).mean()

    return Hand(method, {"patient": (2.0, term)}, 1 - alpha, alpha)


def distilbert(step: Step) -> Hand:
    alpha = step.pick(1.0, 0.0, 0.6)
    method = DistilBERT(alpha=alpha, beta=0.4, **softened(step))

    def term(c: Compared) -> Tensor:
        s, t = c.s.hidden[-1][c.mask], c.t.hidden[-1][c.mask]
        return (1 - F.cosine_similarity(s, t, dim=-1)).mean()

    return Hand(method, {"cosine": (0.4, term)}, 1 - alpha, alpha)


def embeddings(step: Step) -> Hand:
    task, same = heads(step)[0], step.student.config.hidden_size == 16
    unit, pool = step.chance(0.5), step.pick("mean", "cls", "cls")
    method = Embeddings(cos_nce=0.7, relations=0.5, cca=0.01, cosine=0.2 * same, mse=2.0 * same,
                        task_weight=task, pooling=pool, unit_length=unit)  # fmt: skip

    def both(c: Compared) -> tuple[Tensor, Tensor]:
        return tuple(F.normalize(x, dim=-1) if unit else x for x in c.pool(pool))

    terms = {
        "contrast": (0.7, lambda s, t: fastkd.cos_nce_loss(mapped(method.W, s), t)),
        "samples": (0.5, lambda s, t: relation_loss(s, t, over="samples")),
        "correlations": (0.01, lambda s, t: fastkd.cca_loss(s[None], t[None], ridge=0.1)),
        "angles": (0.2 * same, lambda s, t: (1 - F.cosine_similarity(s, t)).mean()),
        "squares": (2.0 * same, lambda s, t: F.mse_loss(s, t)),
    }
    terms = {n: (w, lambda c, f=f: f(*both(c))) for n, (w, f) in terms.items()}
    return Hand(method, terms, task, 0.0, pooled=True)


def gold(step: Step) -> Hand:
    """Merged distributions and likelihoods of spans of two tokenizers."""
    task, how, hybrid = step.weight(), step.pick("observed", "bayesian"), step.chance(0.5)
    tau, beta = step.number(0.7, 3.0), step.pick(0.3, 0.3, 0.0, 1.0)
    weights = step.pick((0.8, 0.3), (1.2, 0.0), (0.0, 0.6))
    method = GOLD(task_weight=task, merged_weight=weights[0], likelihood_weight=weights[1],
                  hybrid=hybrid, merge=how, beta=beta, temperature=tau)  # fmt: skip
    late = how == "bayesian"

    def spans(c: Compared, text: int, ahead: bool) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Of each span that both models have: logits and ids of its tokens, of each model.

        ``ahead``: the logits that predict the tokens, else those that follow them.
        """
        x, sides = c.step.texts[text], []
        for run, ids, own in zip((c.s, c.t), (x.ids, x.teacher), x.spans, strict=True):
            own = own if run is c.t or x.labels is None else own.where(x.labels != -100, -1)
            z, shift = run.logits[text], int(ahead)
            sides.append((z[: len(ids) - shift], ids[shift:], own[shift:]))
        for span in range(3):
            at = [own == span for _, _, own in sides]
            if all(x.any() for x in at):
                yield [(z[n], ids[n]) for (z, ids, _), n in zip(sides, at, strict=True)]

    def of_spans(each: Any, ahead: bool) -> Any:
        """Mean over the spans of each text, then over texts."""

        def term(c: Compared) -> Tensor:
            texts = [torch.zeros(()).double() for _ in c.step.texts]
            for text in range(len(texts)):
                losses = [each(c, *both) for both in spans(c, text, ahead)]
                texts[text] = sum(losses, texts[text]) / max(len(losses), 1)
            return torch.stack(texts).mean()

        return term

    def merged(z: Tensor, ids: Tensor) -> Tensor:
        """One token's probabilities times those of the span's other tokens."""
        p, kept = (z / tau).softmax(-1), len(ids) - 1 if late else 0
        others = [p[n, i].clamp(min=1e-8) for n, i in enumerate(ids) if n != kept]
        return math.prod(others, start=p[kept])

    def distance(c: Compared, ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> Tensor:
        rest, share, js, match = [merged(*ours), merged(*theirs)], 0.0, 0.0, c.step.match
        if hybrid:
            sides = [*zip(rest, (match.student_ids, match.teacher_ids), strict=True)]
            q, p = (x[ids].clamp(min=1e-8) for x, ids in sides)
            m = beta * p + (1 - beta) * q
            js = (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum()
            if beta in (0, 1):
                js = (p * (p / q).log() if beta == 0 else q * (q / p).log()).sum()
            rest = [x[~torch.isin(torch.arange(len(x)), ids)] for x, ids in sides]
            share = len(match.teacher_ids) / match.teacher_size
        q, p = (F.pad(x.sort(descending=True).values, (0, V + 4 - len(x))) for x in rest)
        return share * js + (1 - share) * (p - q).abs().sum()

    def divergence(c: Compared, *sides: tuple[Tensor, Tensor]) -> Tensor:
        """Of a span's likelihoods, the student's q and the teacher's p."""
        own = (z.log_softmax(-1).gather(1, ids[:, None]).sum() for z, ids in sides)
        q, p = ((x / tau).exp() for x in own)
        return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()

    terms = {
        "merged": (weights[0], of_spans(distance, late)),
        "likelihood": (weights[1], of_spans(divergence, True)),
    }
    return Hand(method, terms, task)


def several(step: Step) -> Hand:
    """Two methods, each with layers and predictions of its own."""
    makers = [fcd, lrkd, mc3kd, lrc_bert, *([soft_targets] if step.head != "none" else [])]
    each = []
    for make in step.random.sample(makers, 2):
        step.layers = [1, 3]
        each.append(make(step))
        each[-1].layers = step.layers
    made = Hand(
        distill.Several(*(x.method for x in each)), progress=min(x.progress for x in each),
        perturb=max(x.perturb for x in each), needs_labels=any(x.needs_labels for x in each),
    )  # fmt: skip
    made.weights = {f"{i}.{n}": w for i, x in enumerate(each) for n, w in x.weights.items()}

    def terms(c: Compared) -> dict[str, Tensor]:
        found = {}
        for i, x in enumerate(each):
            step.layers = x.layers
            found |= {f"{i}.{name}": value for name, value in x.terms(c.each[i]).items()}
        return found

    made.terms = terms
    return made


METHODS = {f.__name__: f for f in (
    labels, soft_targets, fcd, knn, lrc_bert, mc3kd, lrkd, attention, pkd, distilbert, embeddings,
    several, gold, minilm, minilmv2,
)}  # fmt: skip
WRITERS = [("gpt2", "next word"), ("llama", "next word")]  # whose tokenizers may be two
# KNN needs a class of each text; a method of the outputs a head.
PAIRS = [
    (kind, name) for kind in KINDS for name in METHODS
    if not (kind[1] == "none" and name in ("labels", "soft_targets", "pkd", "distilbert"))
    and not (name == "knn" and kind[1] not in ("sequence", "none"))
    and not (name == "gold" and kind not in WRITERS)
    and not (kind[1] == "written words" and name in ("pkd", "embeddings"))
    and (name not in READ_QKV or kind[0] in SHOW_QKV)
]  # fmt: skip
# Few of them compare the predictions of two tokenizers.
PAIRS += 8 * [(kind, name) for kind in WRITERS for name in ("gold", "soft_targets", "fcd")]


@functools.cache
def teacher_of(
    family: str, head: str, numbers: bool, number: int = 0, wide: bool = False, narrow: bool = False
) -> Any:
    """Three layers of width 16, in float64; ``wide``: four more entries in its vocabulary."""
    model = model_of(family, head)
    torch.manual_seed(10 + number)
    if family == "llama":  # two queries share each of its two keys
        model.config.update({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4})
    model.config.num_labels = 1 if numbers else model.config.num_labels
    model = type(model)(model.config)
    if narrow:
        model = distill.student_from_teacher(model, config={"hidden_size": 8})
    if wide:
        model.resize_token_embeddings(V + 4, mean_resizing=False)
    return with_noise(model, 0.05).double().eval()


@functools.cache
def student_of(family: str, head: str, numbers: bool, width: int) -> Any:
    """Layers 1 and 3 of the family's teacher, with noise, and without dropout."""
    options = {} if width == 16 else {"config": {"hidden_size": width}}
    model = distill.student_from_teacher(teacher_of(family, head, numbers), [1, 3], **options)
    set_dropout(model)
    torch.manual_seed(20)
    return with_noise(model, 0.1)


def failure(seed: int) -> str | None:
    """What is wrong with the step of this seed, or None."""
    outside = mock.patch.object(Offload, "leave", leave)
    most = mock.patch("fastkd.distill.attention_relations.MOST_HEADS", 8)
    with warnings.catch_warnings(), outside, most, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        step = Step(seed)
        try:
            wrong = _wrong(step, folder)
        except Exception:
            wrong = traceback.format_exc(limit=-6)
    return f"{described(step)}\n{wrong}" if wrong else None


def described(step: Step) -> str:
    drawn = {n: x for n, x in vars(step).items() if isinstance(x, str | float | bool | list)}
    about = {n: x for n, x in drawn.items() if n not in ("texts", "teachers", "batches")}
    texts = [tuple(x.ids.shape) for x in step.texts]
    models = [type(x).__name__ for x in (step.student, *step.teachers)]
    return f"{step.hand.method!r}\n  {about}, texts={texts}, {models}"


def offloaded(step: Step, folder: str) -> list[Any]:
    """The teachers, or copies that are moved away."""
    if not step.form.startswith("offloaded"):
        return step.teachers
    teachers, cpu = [copy.deepcopy(x) for x in step.teachers], torch.device("cpu")
    for number, teacher in enumerate(teachers):
        if step.form == "offloaded":
            distill.offload(teacher, cpu)
        elif step.form == "offloaded by accelerate":
            accelerate.cpu_offload(teacher, cpu)
        else:
            accelerate.disk_offload(teacher, f"{folder}/of {number}", cpu)
    return teachers


def _wrong(step: Step, folder: str) -> str | None:
    step.batches = batches = step.micro_batches()
    teachers = offloaded(step, folder)
    distiller = step.distiller(step.taught(teachers))
    with_noise(step.hand.method, 0.1)
    if step.stored:
        alike = step.layout == "none" or step.family == "xlnet"
        rows = step.batch(0, len(step.texts), step.layout if alike else "right")
        counted = step.start == 0  # positions that a model counts by itself
        for name in ("teacher_id", "position_ids")[: 1 + counted]:
            rows.pop(name, None)
        caches = []
        for number, teacher in enumerate(teachers):
            live = step.distiller(teacher)
            caches.append(live.cache_teacher([rows], f"{folder}/{number}", top_k=step.top_k))
        distiller = step.distiller(step.taught(caches))
    logits: list[Any] = []
    distiller.register_forward_hook(lambda module, args, out: logits.append(out.logits))
    half = step.form == "autocast"
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=half)
    if not step.parts and step.chance(0.5):  # the backward pass runs outside
        distiller.forward, autocast = autocast(distiller.forward), contextlib.nullcontext()
    with autocast:
        if step.spread:
            terms, gradients = over_processes(step, distiller)
        else:
            terms, gradients = taken(distiller, batches if step.parts else batches[0])
    if any(x.requires_grad for x in terms.values()):
        return "the terms require grad"
    if terms["loss"].dtype == torch.bfloat16:
        return "the loss is rounded"
    distiller.zero_grad()
    for teacher in (*teachers, *step.teachers):
        teacher.eval()
    loss, expected, compared = step.by_hand()
    # Nothing may be compared.
    (loss + 0 * sum(p.sum() for p in distiller.parameters() if p.requires_grad)).backward()
    wanted = gradients_of(distiller)
    if step.per_token:
        count = sum(int(distiller.count_items(x)) for x in batches)
        if count != (known := len(compared.predictions[0][0])):
            return f"count_items: {count}, not {known}"
    if not (half or step.parts) and (wrong := _logits(step, logits[0], compared.s.logits)):
        return wrong
    rounded = {step.family, step.teachers[0].config.model_type} & ROUNDED
    rtol = 1e-5 if step.top_k or rounded or "float32" in step.form else 1e-9
    if step.name in ("mc3kd", "embeddings", "several"):  # CCA leaves out correlations of 1.2e-7
        rtol = max(rtol, 1e-6)
    rtol = 0.05 if half else rtol
    expected = {**expected, "total": loss, "loss": loss}
    if wrong := _apart(terms, expected, rtol):
        return wrong
    largest, zero = max(float(g.abs().max()) for g in wanted.values()), torch.zeros(())
    for name in {**wanted, **gradients}:
        error = float((gradients.get(name, zero) - wanted.get(name, zero)).abs().max())
        if not error <= (100 if not half else 1e9 if step.kinks else 6) * rtol * max(largest, 1e-3):
            return f"gradient of {name}: error {error:.3g} of {largest:.3g}"
    if step.hand.perturb or step.form == "average" or not step.chance(0.3):
        return None
    distiller.eval()
    with torch.no_grad() if step.form.startswith("offloaded") else torch.inference_mode():
        outs = list(distiller.accumulate(step.batches)) if step.parts else [distiller(**batches[0])]
    found = [{**out.terms, "loss": out.loss} for out in outs]
    return _apart({name: sum(x[name] for x in found) for name in found[0]}, expected, rtol)


def _apart(terms: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> str | None:
    if terms.keys() != expected.keys():
        return f"terms {sorted(terms)}, not {sorted(expected)}"
    size = max(1.0, *(abs(float(x)) for x in expected.values()))
    for name, x in expected.items():
        if not abs(float(terms[name] - x)) <= rtol * size:
            return f"{name}: {float(terms[name])}, not {float(x)}"
    return None


def over_processes(step: Step, distiller: Distiller) -> Any:
    """Means of terms and gradients of processes that have one micro-batch or several, or no row.

    BART's heads need a row.
    """
    first = step.batches[0]
    ranks = [[x] for x in step.batches]
    if len(ranks) > 2 and step.chance(0.5):
        ranks[:2] = [step.batches[:2]]
    elif step.layout not in PACKED and step.family != "bart" and step.chance(0.3):
        ranks.append([{name: x[:0] for name, x in first.items()}])
    pieces = all(len(x) == 1 for x in ranks) and step.chance(0.5)

    def each(rank: int) -> Any:
        return taken(copy.deepcopy(distiller), ranks[rank][0] if pieces else ranks[rank])

    found = run_threads(len(ranks), each)
    return tuple(
        {name: sum(x[name] for x in each) / len(ranks) for name in each[0]}
        for each in zip(*found, strict=True)
    )


def _logits(step: Step, found: Any, expected: list[Any]) -> str | None:
    """Logits in the order of the input's tokens, or None by default for a vocabulary."""
    none = step.head == "none" or (
        step.head in ("masked words", "next word")
        and not (step.keep_logits or step.form.startswith("halved"))
    )
    if none or found is None:
        return None if none and found is None else f"the logits are {found}"
    if step.layout in PACKED:
        mask = step.batches[0].get("attention_mask", torch.ones(found.shape[:2]))
        rows, expected = [found[mask.bool()]], [torch.cat(expected)]
    elif step.head == "answers" or step.per_token:
        both = torch.stack(found, 1) if step.head == "answers" else found
        dim, rows = (1 if step.head == "answers" else 0), []
        for x, e in zip(both, expected, strict=True):
            start = x.shape[dim] - e.shape[dim] if step.front else 0
            rows.append(x.narrow(dim, start, e.shape[dim]))
    else:
        rows = list(found)
    for x, e in zip(rows, expected, strict=True):
        if not torch.allclose(x.double(), e, rtol=1e-5, atol=1e-5):
            return f"logits are {x}, not {e}"
    return None
