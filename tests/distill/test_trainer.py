"""DistillationTrainer: schedule, logs, evaluation, saving and resuming."""

import copy
import random

import pytest
import torch
import transformers as t
from datasets import Dataset

from fastkd.distill import (
    FCD,
    LRKD,
    MC3KD,
    DistillationTrainer,
    Distiller,
    Several,
    SoftTargets,
    method_by_name,
    select_layers,
    student_from_teacher,
)
from fastkd.distill.methods import Labels
from tests.distill.models import batch, classifier, model, pair, recipe, set_dropout, split
from tests.distill.processes import run_ranks
from tests.support.compare import raises
from tests.support.draw import FIRST

pytestmark = pytest.mark.filterwarnings("ignore:CCALoss")


def rows(count=32):
    torch.manual_seed(0)
    return split(batch(rows=count))


def few_labels(labelled=3, count=21):
    data = batch(rows=count)
    data["labels"] = torch.where(torch.arange(count) < labelled, data["labels"], -100)
    return Dataset.from_dict({name: value.tolist() for name, value in data.items()})


def test_labelled_rows_are_repeated(tmp_path):
    """2 of 8 rows have labels in every batch, in another order in each epoch."""
    seen, data = [], few_labels()
    run = trainer(tmp_path, SoftTargets(), data, save_strategy="no")
    run.distiller.register_forward_pre_hook(
        lambda module, args, inputs: seen.append(inputs), with_kwargs=True
    )
    run.train()
    assert [int((x["labels"] != -100).sum()) for x in seen] == [2] * 6
    assert {len(x["labels"]) for x in seen} == {8}
    halves = seen[:3], seen[3:]
    epochs = [torch.cat([x["input_ids"] for x in half]).tolist() for half in halves]
    assert all(row in epoch for row in data["input_ids"] for epoch in epochs)
    assert epochs[0] != epochs[1]


class Tokens(torch.utils.data.Dataset):
    """Rows with a label for each token; reading the whole column raises."""

    column_names = ("input_ids", "labels")

    def __len__(self):
        return 8

    def __getitem__(self, row):
        assert isinstance(row, int), f"all of {row} was read"
        return {"input_ids": [1, 2], "labels": [-100, 1]}


def test_labelled_share_may_be_off_and_is_checked(tmp_path):
    accumulated = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    run = trainer(tmp_path, SoftTargets(), few_labels(), **accumulated)
    step = list(run.get_train_dataloader())[:2]
    assert sum(int((part["labels"] != -100).sum()) for part in step) == 2
    run = trainer(tmp_path, SoftTargets(), few_labels())
    assert len(run.get_train_dataloader()) == 3
    words = "labelled_share must be at most 1, got 2"
    raises(words, DistillationTrainer, model=run.distiller, labelled_share=2)
    tokens = trainer(tmp_path, SoftTargets(), few_labels())
    run.labelled_share, tokens.train_dataset = 0.0, Tokens()
    for one in (run, tokens):
        assert isinstance(one._get_train_sampler(), torch.utils.data.RandomSampler)


PROBLEMS = {
    "classes": {}, "numbers": {"num_labels": 1},
    "decisions": {"problem_type": "multi_label_classification"},
}  # fmt: skip


class Training:
    """Rows, a method and Trainer's arguments, drawn from a seed."""

    def __init__(self, seed, processes=1):
        draw, _ = random.Random(seed), torch.manual_seed(seed)
        self.kind = draw.choice([*PROBLEMS, "words", "text alone"])
        self.size, self.parts, self.epochs = (
            draw.randint(1, 5),
            draw.randint(1, 4),
            draw.randint(1, 2),
        )
        self.drops, self.clip = draw.random() < 0.3, draw.choice([0.0, 0.05])
        self.processes = processes
        n = draw.randint(max(self.size, 4), 18)
        if processes > 1:  # elsewhere rows are repeated
            n = draw.randint(1, 3) * self.size * processes
        self.data = data = batch(rows=n)
        known, places = torch.rand(n) < draw.choice([0.3, 1.0]), torch.arange(10)
        if self.kind in PROBLEMS:
            self.teacher = classifier("bert", **PROBLEMS[self.kind])
        else:  # unequal numbers of words, where a first word and padding have labels too
            self.teacher = model(t.GPT2LMHeadModel, "gpt2")
            data["attention_mask"] = (places < torch.randint(2, 11, (n, 1))).long()
            unknown = places < torch.arange(n)[:, None] % 4
            data["labels"] = data["input_ids"].masked_fill(unknown, -100)
        if self.kind == "classes":
            data["labels"] = torch.where(known, data["labels"], -100)
        elif self.kind == "numbers":
            data["labels"] = torch.where(known, torch.rand(n), torch.nan)
        elif self.kind == "decisions":
            known = known[:, None] & (torch.rand(n, 3) < 0.9)
            data["labels"] = torch.where(known, torch.rand(n, 3).round(), torch.nan)
        methods = [SoftTargets(alpha=draw.choice([0.3, 1.0])), LRKD(), Labels()]
        if self.kind == "text alone":
            del data["labels"]
            methods = [SoftTargets(alpha=1.0)]
        elif self.parts == processes == 1:  # of one batch's samples
            methods.append(FCD(task_weight=0.5))
        self.method = draw.choice(methods)

    def steps(self):
        """Rows of each step: of ``parts`` batches, or of fewer at the end of an epoch."""
        rows = torch.arange(len(self.data["input_ids"])).split(self.size)
        rows = [x for x in rows if len(x) == self.size or not self.drops]
        together = self.parts * self.processes
        parts = [rows[i : i + together] for i in range(0, len(rows), together)]
        return [torch.cat(x) for x in parts] * self.epochs

    def trainer(self, directory):
        rows = split(self.data)
        run = trainer(
            directory, self.method, rows, self.teacher, max_steps=-1, num_train_epochs=self.epochs,
            gradient_accumulation_steps=self.parts, per_device_train_batch_size=self.size,
            optim="sgd", max_grad_norm=self.clip, lr_scheduler_type="constant", learning_rate=0.1,
            labelled_share=0, dataloader_drop_last=self.drops, save_strategy="no",
        )  # fmt: skip
        run._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
        set_dropout(run.distiller)
        return run

    def check(self, distiller, weights, history):
        """Compare weights and logged terms with those of a loop over all rows of each step."""
        for step, logged in zip(self.steps(), history, strict=False):
            distiller.zero_grad()
            out = distiller(**{name: x[step] for name, x in self.data.items()})
            out.loss.backward()
            learned = [p for p in distiller.parameters() if p.grad is not None]
            if self.clip:
                torch.nn.utils.clip_grad_norm_(learned, self.clip)
            with torch.no_grad():
                for p in learned:
                    p -= 0.1 * p.grad
            for name, value in out.terms.items():
                wanted = pytest.approx(float(value), rel=1e-3, abs=1e-5)
                assert logged[name] == wanted, (vars(self), name)
        for p, found in zip(distiller.parameters(), weights, strict=True):
            atol = 1e-6 + 1e-4 * p.detach().abs().max()
            assert (found - p).abs().max() <= atol, vars(self)


@pytest.mark.parametrize("number", range(16))
def test_random_steps_are_those_of_all_their_rows(tmp_path, number):
    """Whatever parts they come in, and however few of the rows have labels."""
    drawn = Training(FIRST + number)
    run = drawn.trainer(tmp_path)
    expected = copy.deepcopy(run.distiller)
    run.train()
    drawn.check(expected, [*run.distiller.parameters()], run.state.log_history)


def trained_in_two(rank, directory, seeds):
    runs = [Training(seed, 2).trainer(f"{directory}/{seed}") for seed in seeds]
    for run in runs:
        run.train()
    return [([p.detach() for p in x.distiller.parameters()], x.state.log_history) for x in runs]


def test_random_steps_of_two_processes_are_those_of_all_rows(tmp_path):
    seeds = range(FIRST, FIRST + 6)
    (*first,), (*second,) = run_ranks(trained_in_two, 2, tmp_path / "ranks", str(tmp_path), seeds)
    for seed, (weights, history), (others, _) in zip(seeds, first, second, strict=True):
        drawn = Training(seed, 2)
        assert all(map(torch.equal, weights, others))
        drawn.check(drawn.trainer(tmp_path / "alone").distiller, weights, history)


def arguments(directory, **options):
    always = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    return t.TrainingArguments(str(directory), **always, **options)


def trainer(
    directory, method, data=None, teacher=None, prepare_batches=64, labelled_share=0.25, **options
):
    torch.manual_seed(0)
    teacher = classifier("bert") if teacher is None else teacher
    student = student_from_teacher(teacher, [2, 4])
    data = rows() if data is None else data
    given = {
        "max_steps": 6, "per_device_train_batch_size": 8, "logging_steps": 1, "save_steps": 3,
        "learning_rate": 1e-3, **options,
    }  # fmt: skip
    return DistillationTrainer(
        teacher, student, method, args=arguments(directory, **given), train_dataset=data,
        eval_dataset=data, prepare_batches=prepare_batches, labelled_share=labelled_share,
    )  # fmt: skip


def trained(*arguments, **options):
    run = trainer(*arguments, **options)
    run.train()
    return run


def test_a_resumed_run_equals_an_unbroken_run(tmp_path):
    """Within the second epoch of labelled rows that are repeated. Other methods: tests/cli."""
    data = few_labels()
    whole = trained(tmp_path, MC3KD(), data, save_steps=2)
    again = trainer(tmp_path, MC3KD(), data)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    expected, state = whole.distiller.state_dict(), again.distiller.state_dict()
    assert expected.keys() == state.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert again.distiller.method.teacher_layers == whole.distiller.method.teacher_layers

    (tmp_path / "checkpoint-6" / "method.pt").unlink()
    raises(r"has no method.pt", again.train, resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


def test_terms_are_logged_and_the_schedule_is_followed(tmp_path):
    """A term's mean is over the steps that computed it."""

    def logs(steps):
        method = recipe("lrc_bert", first_stage=0.5)
        run = trainer(tmp_path, method, save_strategy="no", logging_steps=steps)
        run.train()
        return [entry for entry in run.state.log_history if "loss" in entry]

    steps, (mean,) = logs(1), logs(6)
    names = {"cos_nce", "soft", "task"}
    assert [entry.keys() & names for entry in steps] == [{"cos_nce"}] * 3 + [names] * 3
    assert all(abs(entry["total"] - entry["loss"]) < 1e-4 for entry in steps)
    for name in ("cos_nce", "soft", "task"):
        values = [entry[name] for entry in steps if name in entry]
        assert mean[name] == pytest.approx(sum(values) / len(values), rel=1e-4)


def test_checkpoints_are_students_and_the_best_is_loaded_at_the_end(tmp_path):
    run = trained(
        tmp_path, method_by_name("lrkd"), learning_rate=0.05, eval_strategy="steps", eval_steps=3,
        load_best_model_at_end=True, metric_for_best_model="eval_loss",
        greater_is_better=True,  # the untrained one, so that the last is not the best
    )  # fmt: skip
    assert run.model is run.distiller
    scores = [e["eval_loss"] for e in run.state.log_history if "eval_loss" in e]
    best = tmp_path / f"checkpoint-{3 * (scores.index(max(scores)) + 1)}"
    kept = torch.load(best / "method.pt")
    method = run.distiller.method.state_dict()
    assert all(torch.equal(value, kept[key]) for key, value in method.items())
    run.save_model(str(tmp_path / "final"))
    for directory in (best, tmp_path / "final"):
        student, info = t.AutoModelForSequenceClassification.from_pretrained(
            directory, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert all(map(torch.equal, student.parameters(), run.distiller.student.parameters()))


def test_evaluation_and_prediction_run_the_student(tmp_path):
    run = trainer(tmp_path, method_by_name("fcd"), save_strategy="no")
    data = rows()
    metrics = run.evaluate()
    inputs = {key: torch.stack([row[key] for row in data]) for key in data[0]}
    with torch.no_grad():
        expected = run.distiller.student.eval()(**inputs)
    assert metrics["eval_loss"] == pytest.approx(expected.loss.item(), rel=1e-5)
    unlabelled = [{key: row[key] for key in row if key != "labels"} for row in data]
    predictions = torch.from_numpy(run.predict(unlabelled).predictions)
    torch.testing.assert_close(predictions, expected.logits)


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
    run = trained(tmp_path, method_by_name("mc3kd"), prepare_batches=2, **short)
    layers = run.distiller.method.teacher_layers
    assert len(layers) == 2 and all(1 <= i <= 4 for i in layers)
    whole = trained(tmp_path, method_by_name("mc3kd"), **short)
    layers = whole.distiller.method.teacher_layers
    everything = [{k: torch.stack([r[k] for r in rows()]) for k in rows()[0]}]
    assert layers == select_layers(whole.distiller.teacher, everything, 2)
    given = trained(tmp_path, method_by_name("mc3kd", layers=layers), **short)
    assert all(map(torch.equal, whole.distiller.parameters(), given.distiller.parameters()))


def with_columns(data, **columns):
    more = [{name: value(row) for name, value in columns.items()} for row in data]
    rows = [{**row, **new} for row, new in zip(data, more, strict=True)]
    return Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in rows])


def flattened(rows):
    """As trl's collator, which reads where documents begin from a column of its own."""
    lengths = [row.get("seq_lengths", [len(row["input_ids"])]) for row in rows]
    positions = [torch.arange(n) for row in lengths for n in row]
    ids = torch.cat([torch.tensor(row["input_ids"]) for row in rows])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": torch.cat(positions)[None]}


def test_packed_rows_are_evaluated_as_in_training(tmp_path):
    """With a mask transformers would take each for one document."""
    torch.manual_seed(0)
    teacher, student = pair("llama", head=t.LlamaForCausalLM)
    ids, positions = torch.randint(5, 60, (4, 6)), torch.tensor([0, 1, 2, 0, 1, 2])
    data = {
        "input_ids": ids, "position_ids": positions.expand(4, 6),
        "attention_mask": torch.ones_like(ids), "labels": ids.masked_fill(positions == 0, -100),
    }  # fmt: skip
    given = {"args": arguments(tmp_path), "eval_dataset": split(data)}
    run = DistillationTrainer(teacher, student, SoftTargets(), **given)
    expected = run.distiller(**data).terms["task"].item()
    assert run.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["other student", "adapters", "several", "segments", "trl"])
def test_columns_of_the_loss_are_kept(kind, tmp_path):
    """The first step's loss is the Distiller's on the whole data, and the student is evaluated."""
    torch.manual_seed(0)
    teacher, student = pair("bert")
    columns = {"token_type_ids": lambda row: row["input_ids"] % 2}
    method, data, collator = method_by_name("fcd"), rows(8), None
    if kind == "other student":
        student = classifier("distilbert", 2)
    elif kind == "adapters":
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
        student = peft.get_peft_model(student, lora)
    elif kind == "several":
        teacher, method = [teacher, classifier("bert")], Several(SoftTargets(), LRKD())
        columns = {
            "teacher_input_ids": lambda row: row["input_ids"] * 7 % 60,
            "teacher_attention_mask": lambda row: row["attention_mask"],
        }
    elif kind == "segments":
        teacher, student = pair("llama", head=t.LlamaForTokenClassification, num_labels=3)
        data = [{"input_ids": row["input_ids"]} for row in data]
        columns = {
            "position_ids": lambda row: torch.arange(10) % 4,
            "segments": lambda row: torch.arange(10) // 8,
            "labels": lambda row: row["input_ids"] % 3,
            "loss_weights": lambda row: torch.linspace(-1, 2, 10),
        }
    else:  # documents of other lengths, packed by trl
        teacher, student = pair("llama", head=t.LlamaForCausalLM)
        data, collator = [{"input_ids": row["input_ids"]} for row in data], flattened
        columns = {"seq_lengths": lambda row: torch.tensor([4, 6])}
    set_dropout(student)
    data, distiller = with_columns(data, **columns), Distiller(teacher, student, method)
    whole = {name: torch.tensor(values) for name, values in data.to_dict().items()}
    expected = distiller(**(flattened(list(data)) if collator else whole)).terms
    args = arguments(tmp_path, max_steps=1, save_strategy="no", logging_steps=1)
    sets = {"train_dataset": data, "eval_dataset": data, "data_collator": collator}
    run = DistillationTrainer(model=distiller, args=args, **sets)
    run.train()
    logged = next(entry for entry in run.state.log_history if "loss" in entry)
    for name, value in expected.items():
        assert logged[name] == pytest.approx(value.item(), rel=1e-5), name
    if collator is None:
        assert run.evaluate()["eval_loss"] > 0


def test_options_of_training_arguments_reach_the_student(tmp_path):
    """Checkpointing and noise; a column that no model takes is dropped; no log needs no terms."""
    data = with_columns(rows(8), text=lambda row: torch.tensor(0))
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
    for words, given, options in (
        ("pass either teacher, student and method", [teacher], {}),
        ("model: pass either teacher", [teacher], {"model": distiller}),
        ("prepare_batches must be at least 1", [], {"model": distiller, "prepare_batches": 0}),
        ("compute_loss_func", [], {"model": distiller, "compute_loss_func": lambda *_: None}),
    ):
        raises(words, DistillationTrainer, *given, args=args, **options)
    smooth = {"label_smoothing_factor": 0.1}
    raises("label_smoothing_factor", trainer, tmp_path, method_by_name("fcd"), **smooth)


def logs_of(rank, directory):
    run = trainer(f"{directory}/{rank}", method_by_name("fcd"), save_strategy="no", max_steps=2)
    seen = []
    inner = run.compute_loss

    def compute_loss(*args, **kwargs):
        loss = inner(*args, **kwargs)
        seen.append({name: total.item() for name, (total, _) in run._logged.items()})
        return loss

    run.compute_loss = compute_loss
    run.train()
    return [entry for entry in run.state.log_history if "loss" in entry], seen


def test_logs_are_means_over_the_processes(tmp_path):
    (logs, first), (_, second) = run_ranks(logs_of, 2, tmp_path, str(tmp_path))
    for entry, a, b in zip(logs, first, second, strict=True):
        assert a["task"] != b["task"]
        for name in a:
            assert entry[name] == pytest.approx((a[name] + b[name]) / 2, rel=1e-5)
        assert entry["total"] == pytest.approx(entry["loss"], abs=1e-4)


def test_question_answering_is_evaluated_with_its_own_labels(tmp_path):
    torch.manual_seed(0)
    teacher, seen = model(t.BertForQuestionAnswering, "bert"), []
    spans = {"start_positions": torch.tensor(1), "end_positions": torch.tensor(3)}
    data = [{**{k: v for k, v in row.items() if k != "labels"}, **spans} for row in rows(8)]

    def compute_metrics(prediction):
        seen.extend(x.shape for x in (*prediction.predictions, *prediction.label_ids))
        return {"accuracy": 1.0}

    run = trainer(tmp_path, SoftTargets(), data, teacher, save_strategy="no", max_steps=2)
    run.compute_metrics = compute_metrics
    run.train()
    metrics = run.evaluate()
    assert metrics["eval_accuracy"] == 1.0 and metrics["eval_loss"] > 0
    assert seen == [(8, 10), (8, 10), (8,), (8,)]


def test_every_run_of_model_init_starts_from_a_new_model(tmp_path):
    """Each trial also chooses layers from data, as a run of its own does."""
    teacher = classifier("bert")

    def model_init():
        return Distiller(teacher, student_from_teacher(teacher, [2, 4]), MC3KD(beta=0.01))

    args = arguments(tmp_path, max_steps=2, save_strategy="no")
    runs = DistillationTrainer(model_init=model_init, args=args, train_dataset=rows())
    states = []
    for _ in range(2):
        before = runs.distiller
        runs.train()
        assert runs.distiller is not before and runs.distiller.method.prepared
        states.append(runs.distiller.state_dict())
    assert all(map(torch.equal, *(state.values() for state in states)))
    words, wrong = "model_init must return a Distiller, got BertFor", {"error": TypeError}
    raises(words, DistillationTrainer, args=args, model_init=lambda: teacher, **wrong)
    words = "model: pass either teacher"
    raises(words, DistillationTrainer, teacher, model_init=model_init, args=args)


def test_hyperparameters_are_searched(tmp_path):
    pytest.importorskip("optuna")
    teacher, args = classifier("bert"), arguments(tmp_path, max_steps=2, save_strategy="no")

    def space(trial):
        return {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)}

    def model_init(trial):
        alpha = trial.suggest_float("alpha", 0.0, 1.0) if trial else 0.5
        return Distiller(teacher, student_from_teacher(teacher, [2, 4]), SoftTargets(alpha=alpha))

    data = {"train_dataset": rows(), "eval_dataset": rows()}
    search = DistillationTrainer(model_init=model_init, args=args, **data)
    best = search.hyperparameter_search(space, n_trials=2, backend="optuna")
    assert best.objective > 0 and best.hyperparameters.keys() == {"alpha", "learning_rate"}


@pytest.mark.parametrize(
    ("name", "steps"), [("fcd", 2), ("lrc_bert", 2), ("knn", 2), ("fcd", 1), ("lrkd", 2)]
)
def test_losses_that_accumulation_changes_warn_once(tmp_path, recwarn, name, steps):
    run = trained(tmp_path, recipe(name), gradient_accumulation_steps=steps, max_steps=1)
    said = [str(w.message) for w in recwarn if "compares samples" in str(w.message)]
    terms = {"fcd": "samples", "lrc_bert": "cos_nce", "knn": "knn"}
    if steps == 1 or name not in terms:
        assert not said
    else:
        (warning,) = said
        assert warning.startswith(f"gradient_accumulation_steps={steps}: ")
        assert f"({terms[name]})" in warning and "Distiller.accumulate" in warning
    assert run.state.global_step == 1
