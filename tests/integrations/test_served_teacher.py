"""A teacher in a live server, against the same teacher in this process."""

import copy
import dataclasses
import shutil

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from fastkd.cli import cache_command
from fastkd.distill import FCD, ByRow, Distiller, SoftTargets, student_from_teacher
from fastkd.integrations import ServedTeacher
from fastkd.integrations.served_teacher import ServerError
from fastkd.train.config import Config
from fastkd.train.distillation import run_distillation
from fastkd.train.errors import InputError, TrainingFailed
from fastkd.train.progress import Display
from tests.support.compare import raises
from tests.support.runs import first_step, made
from tests.train.tasks.through import make_decoder, write_text

pytest.importorskip("httpx")
pytest.importorskip("aiohttp")
from tests.integrations.protocol_server import Server

V = 40


def make_teacher(width=16):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=V, n_positions=32, n_embd=width, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def teacher():
    return make_teacher()


@pytest.fixture(scope="module")
def server(teacher, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    teacher.save_pretrained(folder)
    served = Server(folder)
    yield served
    served.stop()


@pytest.fixture(autouse=True)
def _no_faults_left(server):
    yield
    server.plant()


def batch(seed=0, rows=3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (rows, 9), generator=generator)
    mask = (torch.arange(9) < torch.tensor([[9], [5], [7]])[:rows]).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def served_by(server, protocol, **options):
    given = {"top_k": V, "retries": 3, "timeout": 20.0, **options}
    return ServedTeacher(server.address + ("/v1" if protocol == "vllm" else ""), "tiny", **given)


def step(teacher, student, inputs, method=None):
    distiller = Distiller(teacher, student, method or SoftTargets(temperature=1.0))
    out = distiller(**inputs)
    out.loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in student.parameters() if p.grad is not None])
    return out.loss.detach(), gradient


def assert_same_step(served, teacher, inputs, method=None, oracle=None):
    """``served`` gives the step of ``oracle``, by default of the ``teacher`` in this process."""
    student = student_from_teacher(teacher, [1])
    loss, gradient = step(served, copy.deepcopy(student), inputs, copy.deepcopy(method))
    expected, of_oracle = step(oracle or teacher, student, inputs, copy.deepcopy(method))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, of_oracle, rtol=1e-4, atol=1e-6)


def distiller_of(served, teacher, temperature=1.0):
    student = student_from_teacher(teacher, [1])
    return Distiller(served, student, SoftTargets(temperature=temperature))


def cache_of_top_k(teacher, k, folder):
    writer = distiller_of(teacher, teacher)
    return writer.cache_teacher([batch()], folder / "cache", top_k=k)


@pytest.mark.parametrize(
    ("protocol", "k"), [("vllm", V), ("sglang", V), ("vllm", 5), ("sglang", 5), ("sglang", None)]
)
def test_step_and_cache_are_those_of_the_teacher_here(server, teacher, tmp_path, protocol, k):
    """A top k equals a cache of it; the head's inputs give distributions at any temperature."""
    inputs, method = [batch(), batch(1)], SoftTargets(temperature=1.0 if k else 2.0)
    head = {} if k else {"hidden_states": True, "head": teacher.lm_head.weight.detach()}
    served = served_by(server, protocol, top_k=k, **head)
    oracle = cache_of_top_k(teacher, 5, tmp_path) if k == 5 else teacher
    assert_same_step(served, teacher, batch(), method, oracle)
    distiller = distiller_of(served, teacher, method.temperature)
    cache = distiller.cache_teacher(inputs, tmp_path / "served")
    assert_same_step(cache, teacher, batch(), method, oracle)
    assert len(distiller.cache_teacher(inputs, tmp_path / "served")) == 6  # nothing is missing


def test_packed_and_left_padded_rows(server, teacher):
    ids = torch.randint(V, (1, 12))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    packed = {"input_ids": ids, "position_ids": positions}
    packed["labels"] = ids.masked_fill(positions == 0, -100)
    assert_same_step(served_by(server, "sglang"), teacher, packed)
    padded = {name: x.flip(1) for name, x in batch().items()}
    assert_same_step(served_by(server, "vllm"), teacher, padded)


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr("fastkd.integrations.served_teacher.LONGEST_PAUSE", 0.01)


# Slow answers time out and are requested again.
@pytest.mark.parametrize("fault", [500, 429, "cut", "drip"])
def test_passing_faults_change_nothing(server, teacher, fault, short_pauses):
    server.plant(fault, *[fault] * (fault != "drip"))
    timeout = 0.5 if fault == "drip" else 20.0
    assert_same_step(served_by(server, "vllm", timeout=timeout), teacher, batch())


# Entries of a wrong form or with wrong numbers: test_served_top_k.py.
@pytest.mark.parametrize(("fault", "sentence"), [
    (404, "refuses a row of"), ("truncate", "without truncation"),
    ("token", "without added tokens"), ("logits", "log-probabilities"),
    ("shift", r"entry \d is not for the prompt's token"), ("choices", "2 answers to one prompt"),
    ("other", r"entry \d is not for the prompt's token|without added tokens"),
])  # fmt: skip
@pytest.mark.parametrize("protocol", ["vllm", "sglang"])
def test_answers_that_teach_nothing_end_in_a_sentence(server, teacher, fault, sentence, protocol):
    server.plant(*[fault] * 9)  # requests of the test before may still come
    served = served_by(server, protocol, top_k=3)
    raises(sentence, distiller_of(served, teacher), error=ServerError, **batch())


def test_a_server_that_goes_away_costs_no_rows(teacher, tmp_path, short_pauses):
    teacher.save_pretrained(tmp_path)
    first = Server(tmp_path)
    served = ServedTeacher(f"{first.address}/v1", "tiny", top_k=V, retries=600)
    distiller, inputs = distiller_of(served, teacher), batch()
    before = distiller(**inputs).loss
    first.stop()
    served.request(distiller.read(inputs))
    second = Server(tmp_path, first.port)
    assert torch.equal(distiller(**inputs).loss, before)
    second.stop()
    gone = ServedTeacher(f"{first.address}/v1", "tiny", top_k=V, retries=1)
    words = r"gave no answer in 2 tries .*resume"
    raises(words, distiller_of(gone, teacher), error=ServerError, **inputs)


def test_next_batches_are_in_flight_and_each_row_is_requested_once(server, teacher):
    served = served_by(server, "vllm", prefetch=2)
    distiller = distiller_of(served, teacher)
    batches = [batch(seed) for seed in range(4)]
    server.plant()
    seen = []
    for inputs in served.ahead(batches, distiller):
        seen.append(len(served._pending))
        distiller(**inputs)
    assert seen == [9, 9, 6, 3]
    assert sorted(server.plant()) == sorted(4 * [9, 5, 7])
    assert served.rows == 12 and "rows/s" in served.throughput()


def test_each_served_teacher_is_asked_for_its_rows(server, teacher):
    inputs = {**batch(), "teacher_id": [0, 1, 0]}
    served = served_by(server, "vllm")
    distiller = distiller_of(ByRow({"live": served, "here": teacher}), teacher)
    server.plant()
    (out,) = (distiller(**each) for each in served.ahead([inputs], distiller))
    assert sorted(server.plant()) == [7, 9]
    del inputs["teacher_id"]
    expected = distiller_of(teacher, teacher)(**inputs)
    torch.testing.assert_close(out.loss, expected.loss, rtol=1e-5, atol=1e-6)


def test_refusals(server, teacher):
    raises("pass one of the two", ServedTeacher, server.address, "tiny")
    raises("need head", ServedTeacher, server.address, "tiny", hidden_states=True)
    served, student = served_by(server, "vllm"), student_from_teacher(teacher, [1])
    raises("the method compares layers", Distiller, served, student, FCD())
    raises("one temperature", Distiller, served, student, SoftTargets(temperature=3.0))
    served.top_k = V + 1
    raises("tokens", distiller_of(served, teacher), error=ServerError, **batch())
    served = served_by(server, "vllm", top_k=5, temperature=2.0)
    distiller = distiller_of(served, teacher, temperature=2.0)
    raises("ignore the temperature 2", distiller, error=ServerError, **batch())


def test_command_learns_from_a_server_as_from_the_model(tmp_path, request):
    """`fastkd distill --teacher URL` reaches the student of `fastkd distill --teacher DIR`."""
    decoder = Server(make_decoder(tmp_path / "teacher"))
    request.addfinalizer(decoder.stop)
    shutil.copytree(tmp_path / "teacher", tmp_path / "student")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "teacher")
    student_from_teacher(model, [1]).save_pretrained(tmp_path / "student")
    write_text(tmp_path / "train.txt", 24)
    write_text(tmp_path / "eval.txt", 4)
    given = {
        "task": "causal-lm", "train": tmp_path / "train.txt", "evals": tmp_path / "eval.txt",
        "student": str(tmp_path / "student"), "method": "soft_targets",
        "options": {"temperature": 1.0}, "num_train_epochs": 2, "batch_size": 4, "max_length": 16,
        "device_name": "cpu",
    }  # fmt: skip
    teacher, files = str(tmp_path / "teacher"), {"teacher": str(tmp_path / "files")}
    here = run_distillation(Config.of(out=tmp_path / "here", **given, teacher=teacher))
    # A server that is gone ends the run in a sentence; the resumed run ends as the other.
    more = {"teacher": f"{decoder.address}/v1", "teacher_model": "tiny", "top_k": 17}
    decoder.plant(*[None] * 9, 404)
    cut = Config.of(out=tmp_path / "cut", **given, **more)
    raises("refuses a row of", run_distillation, cut, error=TrainingFailed)
    decoder.plant()
    resumed = run_distillation(dataclasses.replace(cut, resume=True))
    assert resumed["student"]["perplexity"] == pytest.approx(here["student"]["perplexity"])
    assert "waited" in resumed["served_teacher"]
    # A cache of the server, and the files that it has written for other tools, teach the same.
    names = ("task", "train", "evals", "student", "method", "options", "max_length", "device_name")
    cached = {name: given[name] for name in names}
    export = {"export": tmp_path / "files", "batch_size": 4, "out": tmp_path / "cache"}
    settings = Config.of(command="cache", **export, **cached, **more)
    cache_command.write(settings, Display())
    _, expected = first_step(**given, teacher=teacher)
    for options in (
        {"teacher": teacher, "teacher_offload": True}, files,
        {"teacher_cache": tmp_path / "cache", "student": None},
    ):  # fmt: skip
        _, terms = first_step(**{**given, **options})
        torch.testing.assert_close(terms["soft"], expected["soft"], rtol=1e-5, atol=1e-7)
    words = r"files: .*train.txt, row 1 is not in it; write it"
    shorter = Config.of(out=tmp_path / "no", **{**given, **files, "max_length": 8})
    raises(words, run_distillation, shorter, error=InputError)
    alone = {**given, "student": None, "teacher": decoder.address}
    raises("pass --student", made, error=InputError, **alone)
