"""DistillationTrainer: schedule, logs, evaluation, saving and resuming."""

import copy
import math
import random

import numpy as np
import pytest
import torch
import transformers as t
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from fastkd import distill
from fastkd.distill import DistillationTrainer, Distiller, SoftTargets, method_by_name
from fastkd.distill.labelled_order import LabelledOrder, has_label
from fastkd.distill.methods import Labels
from fastkd.distill.trainer import count_labels
from tests.distill.models import batch, classifier, model, padded_left, pair, set_dropout, split
from tests.distill.processes import run_ranks
from tests.support.compare import raises
from tests.support.draw import FIRST

pytestmark = pytest.mark.filterwarnings("ignore:CCALoss")


def rows(count=32):
    torch.manual_seed(0)
    return split(batch(rows=count))


def dataset(data):
    return Dataset.from_dict({name: value.tolist() for name, value in data.items()})


def few_labels(labelled=3, count=21):
    data = batch(rows=count)
    data["labels"] = torch.where(torch.arange(count) < labelled, data["labels"], -100)
    return dataset(data)


def test_labelled_rows_are_repeated(tmp_path):
    """2 of 8 rows have labels in every batch, in another order in each epoch."""
    seen, data = [], few_labels()
    run = trainer(tmp_path, SoftTargets(), data, save_strategy="no")
    run.distiller.register_forward_pre_hook(lambda *given: seen.append(given[2]), with_kwargs=True)
    run.train()
    assert [int((x["labels"] != -100).sum()) for x in seen] == [2] * 6
    assert {len(x["labels"]) for x in seen} == {8}
    halves = seen[:3], seen[3:]
    epochs = [torch.cat([x["input_ids"] for x in half]).tolist() for half in halves]
    assert all(row in epoch for row in data["input_ids"] for epoch in epochs)
    assert epochs[0] != epochs[1]
    run.labelled_share = 0.0
    assert isinstance(run._get_train_sampler(), torch.utils.data.RandomSampler)


def test_answers_in_vectors_of_tokens_are_counted():
    given = {"inputs_embeds": torch.zeros(3, 4, 2), "start_positions": torch.tensor([3, 4, -100])}
    assert count_labels(given) == (1, 3)


PROBLEMS = {
    "classes": {}, "numbers": {"num_labels": 1},
    "decisions": {"problem_type": "multi_label_classification"},
}  # fmt: skip


class Training:
    """Rows, a method and Trainer's arguments, drawn from a seed."""

    def __init__(self, seed, processes=1):
        draw, _ = random.Random(seed), torch.manual_seed(seed)
        self.kind = draw.choice([*PROBLEMS, "answers", "words", "text alone"])
        self.size, self.parts = draw.randint(1, 5), seed % 4 + 1
        self.epochs, self.every = draw.randint(1, 2), draw.randint(1, 3)  # and steps of a log
        self.drops, self.processes = draw.random() < 0.3, processes
        self.clip = draw.choice([0.05] if self.kind == "numbers" else [0.0, 0.05])  # or diverges
        n = draw.randint(max(self.size, 4), 18)
        if processes > 1:  # elsewhere rows are repeated
            n = draw.randint(1, 3) * self.size * processes
        self.data = data = batch(rows=n)
        known, places = torch.rand(n) < draw.choice([0.3, 1.0]), torch.arange(10)
        if self.kind in PROBLEMS:
            self.teacher = classifier("bert", **PROBLEMS[self.kind])
        elif self.kind == "answers":
            self.teacher = model(t.BertForQuestionAnswering, "bert")
            del data["labels"]
            # Some are beyond the text or in padding.
            data |= dict.fromkeys(("start_positions", "end_positions"), torch.randint(0, 12, (n,)))
        else:  # unequal numbers of words, where a first word and padding have labels too
            self.teacher = model(t.GPT2LMHeadModel, "gpt2")
            data["attention_mask"] = (places < torch.randint(2, 11, (n, 1))).long()
            unknown = places < torch.arange(n)[:, None] % 4
            data["labels"] = data["input_ids"].masked_fill(unknown, -100)
        # The student's own loss would read the positions that padding shifts.
        self.left = self.kind in ("words", "text alone") and draw.random() < 0.5
        if self.kind == "classes":
            data["labels"] = torch.where(known, data["labels"], -100)
        elif self.kind == "numbers":
            data["labels"] = torch.where(known, torch.rand(n), torch.nan)
        elif self.kind == "decisions":
            known = known[:, None] & (torch.rand(n, 3) < 0.9)
            data["labels"] = torch.where(known, torch.rand(n, 3).round(), torch.nan)
        methods = [SoftTargets(alpha=draw.choice([0.3, 1.0])), distill.LRKD(), Labels()]
        if self.kind == "text alone":
            del data["labels"]
            methods = [SoftTargets(alpha=1.0)]
        elif self.parts == processes == 1:  # of one batch's samples
            methods[2:] = [distill.FCD(task_weight=0.5), distill.LRCBERT(first_stage=0.5)]
        self.method = methods[seed // 4 % len(methods)]

    def steps(self):
        """Rows of each step: of ``parts`` batches, or of fewer at the end of an epoch."""
        rows = torch.arange(len(self.data["input_ids"])).split(self.size)
        rows = [x for x in rows if len(x) == self.size or not self.drops]
        together = self.parts * self.processes
        parts = [rows[i : i + together] for i in range(0, len(rows), together)]
        return [torch.cat(x) for x in parts] * self.epochs

    def trainer(self, directory):
        rows = split(padded_left(self.data) if self.left else self.data)
        run = trainer(
            directory, self.method, rows, self.teacher, max_steps=-1, num_train_epochs=self.epochs,
            gradient_accumulation_steps=self.parts, per_device_train_batch_size=self.size,
            optim="sgd", max_grad_norm=self.clip, lr_scheduler_type="constant", learning_rate=0.1,
            labelled_share=0, dataloader_drop_last=self.drops, save_strategy="no",
            logging_steps=self.every, per_device_eval_batch_size=32,
        )  # fmt: skip
        run._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
        set_dropout(run.distiller)
        return run

    def check(self, distiller, weights, history):
        """Compare weights and logged terms with those of a loop over all rows of each step.

        A term's mean is over the steps that computed it.
        """
        steps, terms = self.steps(), {}
        for number, step in enumerate(steps):
            distiller.zero_grad()
            distiller.set_progress(number / len(steps))
            out = distiller(**{name: x[step] for name, x in self.data.items()})
            out.loss.backward()
            learned = [p for p in distiller.parameters() if p.grad is not None]
            if self.clip:
                torch.nn.utils.clip_grad_norm_(learned, self.clip)
            with torch.no_grad():
                for p in learned:
                    p -= 0.1 * p.grad
            for name, value in {**out.terms, "loss": out.loss}.items():
                terms.setdefault(name, []).append(value.item())
            if (number + 1) % self.every == 0:
                logged = history[number // self.every]
                for name, values in terms.items():
                    wanted = pytest.approx(sum(values) / len(values), rel=1e-3, abs=1e-4)
                    assert logged[name] == wanted, (vars(self), name)
                terms = {}
        for p, found in zip(distiller.parameters(), weights, strict=True):
            atol = 1e-6 + 1e-4 * p.detach().abs().max()
            assert (found - p).abs().max() <= atol, vars(self)


@pytest.mark.parametrize("number", range(12))
def test_random_steps_are_those_of_all_their_rows(tmp_path, number):
    """Whatever parts they come in, and however few of the rows have labels."""
    drawn = Training(FIRST + number)
    run = drawn.trainer(tmp_path)
    expected = copy.deepcopy(run.distiller)
    run.train()
    drawn.check(expected, [*run.distiller.parameters()], run.state.log_history)
    run.args.dataloader_drop_last = False
    found, student = run.predict(run.train_dataset), run.distiller.student.eval()
    with torch.no_grad():
        loss, *logits = student(**drawn.data).to_tuple()[: 3 if drawn.kind == "answers" else 2]
    if drawn.kind == "text alone":
        loss, logits = None, [loss]
    else:
        assert found.metrics["test_loss"] == pytest.approx(loss.item(), rel=1e-4, nan_ok=True)
    predictions = found.predictions if drawn.kind == "answers" else [found.predictions]
    predictions = [torch.from_numpy(x) for x in predictions]
    if drawn.left:
        mask, labels = (padded_left(drawn.data).get(x) for x in ("attention_mask", "labels"))
        assert labels is None or (torch.tensor(found.label_ids) == labels).all()
        predictions[0] = predictions[0][mask.bool()]
        logits[0] = logits[0][drawn.data["attention_mask"].bool()]
    torch.testing.assert_close(predictions, logits)


def trained_in_two(rank, directory, seeds):
    runs = [Training(seed, 2).trainer(f"{directory}/{seed}") for seed in seeds]
    for run in runs:
        run.train()
    return [([p.detach() for p in x.distiller.parameters()], x.state.log_history) for x in runs]


def test_random_steps_of_two_processes_are_those_of_all_rows(tmp_path):
    seeds = range(FIRST, FIRST + 4)
    (*first,), (*second,) = run_ranks(trained_in_two, 2, tmp_path / "ranks", str(tmp_path), seeds)
    for seed, (weights, history), (others, _) in zip(seeds, first, second, strict=True):
        drawn = Training(seed, 2)
        assert all(map(torch.equal, weights, others))
        drawn.check(drawn.trainer(tmp_path / "alone").distiller, weights, history)


def arguments(directory, **options):
    always = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    return t.TrainingArguments(str(directory), **always, **options)


def trainer(directory, method, data=None, teacher=None, labelled_share=0.25, **options):
    torch.manual_seed(0)
    teacher = classifier("bert") if teacher is None else teacher
    student = distill.student_from_teacher(teacher, [2, 4])
    data = rows() if data is None else data
    usual = {"max_steps": 6, "per_device_train_batch_size": 8, "logging_steps": 1, "save_steps": 3}
    args = arguments(directory, **{**usual, "learning_rate": 1e-3, **options})
    given = {"train_dataset": data, "eval_dataset": data, "labelled_share": labelled_share}
    return DistillationTrainer(teacher, student, method, args=args, **given)


def trained(*arguments, **options):
    run = trainer(*arguments, **options)
    run.train()
    return run


def test_a_resumed_run_equals_an_unbroken_run(tmp_path):
    """Within the second epoch of labelled rows that are repeated, with an averaging teacher."""

    def run(directory):
        torch.manual_seed(0)
        student = distill.student_from_teacher(classifier("bert"), [2, 4])
        distiller = Distiller(distill.EMATeacher(student, 0.9), student, distill.MC3KD())
        given = {"max_steps": 6, "save_steps": 2, "per_device_train_batch_size": 8}
        args = arguments(directory, learning_rate=1e-2, **given)
        return DistillationTrainer(model=distiller, args=args, train_dataset=few_labels())

    whole, again = run(tmp_path), run(tmp_path / "again")
    start = copy.deepcopy(whole.distiller.teacher)
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    expected, state = whole.distiller.state_dict(), again.distiller.state_dict()
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    assert again.distiller.method.teacher_layers == whole.distiller.method.teacher_layers
    both = zip(start.parameters(), whole.distiller.teacher.parameters(), strict=True)
    assert not any(torch.equal(*pair) for pair in both if pair[0].any())
    for name in ("ema_teacher.pt", "method.pt"):
        (tmp_path / "checkpoint-6" / name).unlink()
        last = str(tmp_path / "checkpoint-6")
        raises(f"has no {name}", again.train, resume_from_checkpoint=last)


def test_checkpoints_are_students_and_the_best_is_loaded_at_the_end(tmp_path):
    run = trained(
        tmp_path, method_by_name("lrkd"), learning_rate=0.05, eval_strategy="steps", eval_steps=3,
        load_best_model_at_end=True, metric_for_best_model="eval_loss",
        greater_is_better=False,  # it rises, so that the last is not the best
    )  # fmt: skip
    assert run.model is run.distiller
    scores = [e["eval_loss"] for e in run.state.log_history if "eval_loss" in e]
    assert scores[0] < scores[-1]
    best = tmp_path / "checkpoint-3"
    kept = torch.load(best / "method.pt")
    method = run.distiller.method.state_dict()
    assert all(torch.equal(value, kept[key]) for key, value in method.items())
    run.save_model(str(tmp_path / "final"))
    for directory in (best, tmp_path / "final"):
        kind = t.AutoModelForSequenceClassification
        student, info = kind.from_pretrained(directory, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert all(map(torch.equal, student.parameters(), run.distiller.student.parameters()))


def test_an_evaluation_in_half_precision_leaves_the_weights(tmp_path):
    """Trainer rounds its model in place, and would train and save the rounded weights."""
    found = []
    for half in (False, True):
        run = trainer(tmp_path, SoftTargets(), bf16_full_eval=half, save_strategy="no", max_steps=2)
        before, student, seen = copy.deepcopy(run.distiller), run.distiller.student, set()
        student.register_forward_pre_hook(lambda model, args, seen=seen: seen.add(model.dtype))
        run.evaluate()
        assert seen == {torch.bfloat16 if half else torch.float32}
        assert all(map(torch.equal, run.distiller.parameters(), before.parameters()))
        run.train()
        found.append(list(run.distiller.parameters()))
    assert all(map(torch.equal, *found))


def test_mc3kd_is_prepared_from_training_data(tmp_path):
    """Which changes neither the order of the data nor the training."""
    short = {"save_strategy": "no", "max_steps": 2}
    whole = trained(tmp_path, method_by_name("mc3kd"), **short)
    layers = whole.distiller.method.teacher_layers
    everything = [{k: torch.stack([r[k] for r in rows()]) for k in rows()[0]}]
    assert layers == distill.select_layers(whole.distiller.teacher, everything, 2)
    given = trained(tmp_path, method_by_name("mc3kd", layers=layers), **short)
    assert all(map(torch.equal, whole.distiller.parameters(), given.distiller.parameters()))


def flattened(rows):
    """As trl's collator, which reads where documents begin from a column of its own."""
    lengths = [row.get("seq_lengths", [len(row["input_ids"])]) for row in rows]
    positions = [torch.arange(n) for row in lengths for n in row]
    ids = torch.cat([torch.tensor(row["input_ids"]) for row in rows])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": torch.cat(positions)[None]}


@pytest.mark.parametrize(
    "kind", ["other student", "adapters", "several", "segments", "packed", "trl"]
)
def test_columns_of_the_loss_are_kept(kind, tmp_path):
    """The first step's loss is the Distiller's on the whole data, and the student is evaluated."""
    torch.manual_seed(0)
    method, collator, whole = method_by_name("fcd"), None, batch(rows=8)
    ids, places = whole["input_ids"], torch.arange(10).expand(8, 10)
    head = {"segments": t.LlamaForTokenClassification}.get(kind, t.LlamaForCausalLM)
    teacher, student = pair("llama", head=head, num_labels=3)
    if kind in ("other student", "adapters", "several"):
        teacher, student = pair("bert")
        whole["token_type_ids"] = ids % 2
    if kind == "other student":
        student = classifier("distilbert", 2)
    elif kind == "adapters":
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
        student = peft.get_peft_model(student, lora)
    elif kind == "several":
        teacher = [teacher, classifier("bert")]
        method = distill.Several(SoftTargets(), distill.LRKD())
        whole["teacher_input_ids"] = ids * 7 % 60
        whole["teacher_attention_mask"] = whole["attention_mask"]
    elif kind == "segments":
        del whole["attention_mask"]
        whole |= {"position_ids": places % 4, "segments": places // 8, "labels": ids % 3}
        whole["loss_weights"] = torch.linspace(-1, 2, 10).expand(8, 10)
    elif kind == "packed":  # with a mask, by which transformers would take a row for one document
        whole |= {"position_ids": places % 6, "attention_mask": torch.ones_like(ids)}
        whole["labels"] = ids.masked_fill(places % 6 == 0, -100)
    else:  # documents of other lengths, packed by trl
        whole, collator = {"input_ids": ids, "seq_lengths": torch.tensor([[4, 6]] * 8)}, flattened
    set_dropout(student)
    data, distiller = dataset(whole), Distiller(teacher, student, method)
    expected = distiller(**(flattened(list(data)) if collator else whole)).terms
    args = arguments(tmp_path, max_steps=1, save_strategy="no", logging_steps=1)
    sets = {"train_dataset": data, "eval_dataset": data, "data_collator": collator}
    run = DistillationTrainer(model=distiller, args=args, **sets)
    if collator is None:
        task = expected.get("task", expected.get("0.task")).item()
        found = run.evaluate()["eval_loss"]  # without the weights of segments
        assert found > 0 if kind == "segments" else found == pytest.approx(task, rel=1e-5)
    run.train()
    logged = next(entry for entry in run.state.log_history if "loss" in entry)
    for name, value in expected.items():
        assert logged[name] == pytest.approx(value.item(), rel=1e-5), name


def test_options_of_training_arguments_reach_the_student(tmp_path):
    """Checkpointing and noise; a column that no model takes is dropped; no log needs no terms."""
    data = dataset({**batch(rows=8), "text": torch.zeros(8)})
    run = trained(
        tmp_path, method_by_name("fcd"), data, save_strategy="no", logging_strategy="no",
        gradient_checkpointing=True, neftune_noise_alpha=5.0,
    )  # fmt: skip
    assert run.distiller.student.is_gradient_checkpointing
    assert not run.distiller.teacher.is_gradient_checkpointing
    assert "text" not in next(iter(run.get_train_dataloader()))
    assert all(total.dim() == 0 and count == 6 for total, count in run._logged.values())
    assert set(run._logged) == {"task", "soft", "tokens", "samples", "total"}


def test_a_ready_distiller_and_wrong_arguments(tmp_path):
    teacher, student = pair()
    distiller, args = Distiller(teacher, student, SoftTargets()), arguments(tmp_path)
    assert DistillationTrainer(model=distiller, args=args).distiller is distiller
    for words, parts, options in (
        ("pass either teacher, student and method", [teacher], {}),
        ("model: pass either teacher", [teacher], {"model": distiller}),
        ("model: pass either teacher", [teacher], {"model_init": lambda: distiller}),
        ("labelled_share must be at most 1, got 2", [], {"model": distiller, "labelled_share": 2}),
        ("prepare_batches must be at least 1", [], {"model": distiller, "prepare_batches": 0}),
        ("compute_loss_func", [], {"model": distiller, "compute_loss_func": lambda *_: None}),
    ):
        raises(words, DistillationTrainer, *parts, args=args, **options)
    smooth = {"label_smoothing_factor": 0.1}
    raises("label_smoothing_factor", trainer, tmp_path, method_by_name("fcd"), **smooth)


def test_every_run_of_model_init_starts_from_a_new_model(tmp_path):
    """Which chooses layers from data."""
    teacher, made = classifier("bert"), []

    def model_init(trial):
        student = distill.student_from_teacher(teacher, [2, 4])
        made.append(Distiller(teacher, student, distill.MC3KD()))
        return made[-1]

    args = arguments(tmp_path, max_steps=2, save_strategy="no")
    data = {"train_dataset": rows(), "eval_dataset": rows()}
    runs = DistillationTrainer(model_init=model_init, args=args, **data)
    for _ in range(2):
        runs.train()
        assert runs.distiller is made[-1] and runs.distiller.method.prepared
    assert all(map(torch.equal, *(x.state_dict().values() for x in made[-2:])))
    words, wrong = "model_init must return a Distiller, got BertFor", {"error": TypeError}
    raises(words, DistillationTrainer, args=args, model_init=lambda: teacher, **wrong)


def test_losses_that_accumulation_changes_warn_once(tmp_path, recwarn):
    for name, steps, term in (
        ("fcd", 2, "samples"), ("lrc_bert", 2, "cos_nce"), ("knn", 2, "knn"), ("fcd", 1, ""),
        ("lrkd", 2, ""),
    ):  # fmt: skip
        recwarn.clear()
        method = method_by_name(name, preset="paper")
        run = trainer(tmp_path, method, gradient_accumulation_steps=steps)
        run.callback_handler.on_train_begin(run.args, run.state, run.control)
        said = [str(w.message) for w in recwarn if "compares samples" in str(w.message)]
        assert len(said) == bool(term)
        for warning in said:
            assert warning.startswith(f"gradient_accumulation_steps={steps}: ")
            assert f"({term})" in warning and "Distiller.accumulate" in warning


@given(
    st.lists(st.sampled_from([True, *[False] * 5]), min_size=1, max_size=120), st.integers(1, 12),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]), st.integers(0, 3), st.booleans(),
)  # fmt: skip
def test_every_row_is_read_and_each_batch_has_labels(labelled, batch, share, seed, grouped):
    labelled = np.array(labelled)
    order = LabelledOrder(labelled, batch, share, np.arange(len(labelled)) if grouped else None)
    rows = order.draw(np.random.default_rng(seed))
    assert np.array_equal(rows, order.draw(np.random.default_rng(seed)))
    assert len(rows) == order.rows
    if share == 0 and not grouped:  # the random order is unchanged
        assert np.array_equal(rows, np.random.default_rng(seed).permutation(len(labelled)))
    times = np.bincount(rows, minlength=len(labelled))
    assert (times[~labelled] == 1).all()
    assert times.min() >= 1
    wanted = min(math.ceil(share * batch - 1e-9), batch - 1)
    enough = labelled.sum() >= min(share, wanted / batch) * len(labelled)
    if enough or not labelled.any():
        assert (times == 1).all()
        return
    assert times[labelled].max() - times[labelled].min() <= 1
    parts = [rows[start : start + batch] for start in range(0, len(rows), batch)]
    for part in parts:
        assert labelled[part].sum() * batch >= wanted * len(part)
        assert not labelled[part].all()
        for ranks in (2, 3):
            found = [labelled[own].sum() for own in np.array_split(part, ranks)]
            assert max(found) - min(found) <= 1 + (len(part) % ranks > 0)
    assert all(labelled[part].sum() == wanted for part in parts[:-1])


def test_with_lengths_a_batch_has_similar_rows_of_both_kinds():
    labelled, lengths = np.arange(3200) < 100, np.random.default_rng(0).permutation(3200)
    order = LabelledOrder(labelled, 32, lengths=lengths)
    rows = order.draw(np.random.default_rng(0))
    for kind in (True, False):
        parts = np.stack([lengths[x[labelled[x] == kind]] for x in np.split(rows[:1600], 50)])
        assert np.ptp(parts, axis=1).mean() < np.ptp(parts) / 10
        assert (np.diff(parts.mean(1)) < 0).any()  # not from short to long


@pytest.mark.parametrize(("labels", "found"), [
    ([0, -100, 2], [True, False, True]),
    ([0.5, float("nan"), None], [True, False, False]),
    ([[1, 2], [3]], [True, True]),
    ([[1, -100], [-100, -100]], [True, True]),
])  # fmt: skip
def test_what_counts_as_a_label(labels, found):
    assert has_label(labels).tolist() == found
