"""Our models in transformers' Auto classes, pipelines and Trainer, without downloads."""

import socket

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)

import locality
from locality.checkpoints import Preprocessing, create_model, open_model
from locality.errors import UserError
from locality.models import build
from locality.runner.runs import execute
from locality.transformers import (
    LocalityConfig,
    LocalityForImageClassification,
    LocalityModel,
    from_locality,
)

CLASSES = ["cat", "dog", "owl"]
INPUT = Preprocessing(None, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bilinear", 0.9, "squash")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a test asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def model_of(name, **fields):
    """A model with every tensor changed, including BatchNorm statistics."""
    torch.manual_seed(0)
    model = build(name, num_classes=3, **fields).eval()
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data += 0.05 * torch.rand_like(tensor)
    return model


def picture(height=11, width=9):
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def saved(folder, what, **options):
    for part in from_locality(what, **options):
        part.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["convit_nano", "cvt_nano", "timm/test_resnet"])
def test_features_are_ours(tmp_path, name):
    model, x = model_of(name), torch.randn(2, 3, 16, 16)
    theirs = AutoModel.from_pretrained(saved(tmp_path, model))
    with torch.no_grad():
        features, output = model.forward_features(x), theirs(x)
        torch.testing.assert_close(output.last_hidden_state, features)
        pooled = model.forward_head(features, pre_logits=True)
        torch.testing.assert_close(output.pooler_output, pooled)
    extract = pipeline("image-feature-extraction", model=str(tmp_path))
    assert np.shape(extract(picture()))[0] == 1
    assert np.shape(extract(picture(), pool=True)) == (1, pooled.shape[1])


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("name", ["convit_nano", "deit_nano", "cvt_nano"])
def test_logits_are_ours_after_both_ways(tmp_path, name, factor):
    model = model_of(name, **({"freeze_gating": True} if name == "convit_nano" else {}))
    x = torch.randn(2, 3, *(factor * side for side in model.img_size))
    theirs = AutoModelForImageClassification.from_pretrained(saved(tmp_path, model))
    trained = [parameter.requires_grad for parameter in model.parameters()]
    assert [parameter.requires_grad for parameter in theirs.parameters()] == trained
    assert isinstance(theirs, LocalityForImageClassification) and not theirs.training
    assert theirs.locality.config == model.config and theirs.locality.variant == name
    with torch.no_grad():
        logits = model(x)
        torch.testing.assert_close(theirs(x).logits, logits, atol=1e-6, rtol=0)
        torch.testing.assert_close(locality.load(tmp_path)(x), logits, atol=1e-6, rtol=0)


def test_a_model_of_timms_keeps_what_no_weights_hold(tmp_path, randomise):
    name = "timm/eva02_tiny_patch14_224"  # has position tables that are not saved
    model = randomise(build(name, num_classes=3, img_size=28, depth=1))
    theirs = AutoModelForImageClassification.from_pretrained(saved(tmp_path, model))
    x = torch.randn(1, 3, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(theirs(x).logits, model(x), atol=1e-6, rtol=0)


def test_a_saved_folder_is_both_libraries(tmp_path):
    saved(tmp_path, model_of("convit_nano"), preprocessing=INPUT, classes=CLASSES)
    opened, processor = open_model(tmp_path), AutoImageProcessor.from_pretrained(tmp_path)
    assert opened.classes == tuple(CLASSES) and opened.preprocessing == INPUT.at(8)
    assert processor.preprocessing == opened.preprocessing
    assert processor.size == {"height": 8, "width": 8}
    assert (processor.image_mean, processor.image_std) == (INPUT.mean, INPUT.std)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.id2label == dict(enumerate(CLASSES)) and config.label2id["owl"] == 2
    model = AutoModelForImageClassification.from_pretrained(tmp_path)
    again = open_model(locality.save(model, tmp_path / "again"))
    assert again.classes == opened.classes and again.preprocessing == opened.preprocessing


def test_images_are_prepared_as_ours(tmp_path):
    model = model_of("convit_nano")
    processor = from_locality(model, INPUT)[1]
    image = picture()
    wanted = open_model(locality.save(model, tmp_path, preprocessing=INPUT)).prepare([image])
    array = np.asarray(image)
    for given in (image, array, torch.from_numpy(array.copy()).permute(2, 0, 1), [image]):
        assert torch.equal(processor(given, return_tensors="pt")["pixel_values"], wanted)
    assert isinstance(processor([image] * 2, return_tensors="np")["pixel_values"], np.ndarray)
    grey = from_locality(model_of("convit_nano", in_chans=1))[1]
    assert grey(image)["pixel_values"].shape == (1, 1, 8, 8)


def test_a_run_and_a_file_come_with_their_classes_and_preprocessing(tmp_path, tiny_run):
    run = tiny_run(tmp_path / "runs")
    execute(run)
    locality.save(locality.load(run.folder), tmp_path / "saved")
    for what in (run.folder, tmp_path / "saved" / "model.safetensors"):
        ours = open_model(what)
        model, processor = from_locality(what)
        assert not model.training
        inputs = processor(picture())
        with torch.no_grad():
            probabilities = model(**inputs).logits.softmax(-1)
        torch.testing.assert_close(probabilities, ours([picture()]))
        assert [*model.config.id2label.values()] == [*ours.classes]
    # LABEL_0 is not a name.
    assert open_model(saved(tmp_path / "again", model_of("convit_nano"))).classes is None


def test_the_loss_is_there_with_labels_and_first_in_a_tuple():
    model, _ = from_locality(model_of("deit_nano"))
    x, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    model.activation_checkpointing_enable()
    assert model.locality.grad_checkpointing and model.is_activation_checkpointing
    with pytest.raises(UserError, match="every_n_layers"):
        model.activation_checkpointing_enable(every_n_layers=2)
    out = model(x, labels=labels)
    torch.testing.assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, labels))
    assert model(x).loss is None
    assert torch.equal(model(x, return_dict=False)[0], out.logits)
    loss, logits = model(x, labels=labels, return_dict=False)
    assert torch.equal(loss, out.loss) and torch.equal(logits, out.logits)


def test_other_classes_get_a_classifier_of_their_own(tmp_path):
    model = model_of("cvt_nano")
    names = {0: "no", 1: "yes"}
    theirs = AutoModelForImageClassification.from_pretrained(
        saved(tmp_path / "three", model), id2label=names, ignore_mismatched_sizes=True
    )
    head = theirs.locality.get_classifier()
    assert head.weight.shape[0] == 2 and 0.01 < head.weight.std() < 0.03 and not head.bias.any()
    kept = theirs.locality.state_dict()
    for name, tensor in model.state_dict().items():
        assert name.startswith("head.") or torch.equal(kept[name], tensor), name
    theirs.save_pretrained(tmp_path / "two")
    assert open_model(tmp_path / "two").classes == ("no", "yes")


def test_a_model_by_name_begins_as_ours_does():
    config = LocalityConfig(name="convit_nano", num_labels=4)
    torch.manual_seed(0)
    theirs = AutoModelForImageClassification.from_config(config)
    torch.manual_seed(0)
    ours = build("convit_nano", num_classes=4)
    for name, tensor in theirs.locality.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
    with pytest.raises(UserError, match="convit_nano"):
        LocalityConfig(name="convit_nan")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "label"),
    [
        (None, lambda mean: int(mean > 0)),
        ("multi_label_classification", lambda mean: [float(mean > 0), float(mean > -1)]),
        ("regression", lambda mean: [mean, 1.0]),
    ],
)
def test_the_trainer_trains_and_its_checkpoint_is_ours(kind, label, tmp_path):
    torch.manual_seed(0)
    images = torch.randn(40, 3, 8, 8)
    rows = [{"pixel_values": x, "labels": label(x.mean().item())} for x in images]
    ours = create_model("convit_nano", num_classes=2)
    ours.problem_type = kind
    model, _ = from_locality(ours)
    settings = TrainingArguments(
        str(tmp_path), max_steps=10, per_device_train_batch_size=20, learning_rate=1e-2,
        logging_steps=1, save_steps=10, report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    assert after < before and trainer.state.global_step == 10
    ours = locality.load(tmp_path / "checkpoint-10")
    with torch.no_grad():
        torch.testing.assert_close(ours(images), model.eval()(images).logits, atol=1e-6, rtol=0)
    assert ours.problem_type == kind or kind is None
    again = Trainer(from_locality(create_model("convit_nano", num_classes=2))[0], settings)
    again._load_from_checkpoint(str(tmp_path / "checkpoint-10"))
    assert torch.equal(again.model.locality.head.weight.cpu(), ours.head.weight)


@pytest.mark.parametrize("name", ["convit_nano", "deit_nano", "cvt_nano"])
def test_attention_and_hidden_states_are_tuples_of_the_documented_shapes(name):
    source = model_of(name, img_size=32)
    model, _ = from_locality(source)
    x, depth = torch.randn(2, 3, 32, 32), 3 if name == "cvt_nano" else 4
    with torch.no_grad():
        found = model(x, output_attentions=True, output_hidden_states=True)
        torch.testing.assert_close(found.logits, source(x))
    assert len(found.attentions) == depth and len(found.hidden_states) == depth + 1
    for mixed, content, position, gate, states in zip(
        found.attentions,
        found.content_attentions,
        found.positional_attentions,
        found.gates,
        found.hidden_states[1:],
        strict=True,
    ):
        assert mixed.shape[0] == 2 and mixed.shape[2] == states.shape[1]
        torch.testing.assert_close(mixed.sum(-1), torch.ones(mixed.shape[:-1]))
        if gate is None:
            assert torch.equal(mixed, content) and position is None
        else:
            gate = gate[:, None, None]
            torch.testing.assert_close(mixed, (1 - gate) * content + gate * position)
    assert found.hidden_states[-1].shape[1] == 257
    assert LocalityConfig(name=name, img_size=64).architecture["img_size"] == 64
    _, attentions = model(x, output_attentions=True, return_dict=False)[:2]
    assert len(attentions) == depth
    plain = model(torch.randn(1, 3, 48, 48), interpolate_pos_encoding=True)
    assert plain.attentions is plain.hidden_states is None
    model.config.output_hidden_states = True
    assert len(model(x).hidden_states) == depth + 1
    features = LocalityModel(model.config, source)(x, output_attentions=True)
    assert len(features.hidden_states) == depth + 1 and len(features.attentions) == depth


def test_another_classifier_has_no_temperature(tmp_path):
    model = model_of("convit_nano")
    model.temperature = 2.5
    saved(tmp_path, model)
    more = {"num_labels": 2, "ignore_mismatched_sizes": True}
    for options, temperature in (({}, 2.5), (more, 1.0)):
        found = LocalityForImageClassification.from_pretrained(tmp_path, **options)
        assert found.config.temperature == temperature


@pytest.mark.parametrize("asked", ["output_attentions", "output_hidden_states"])
def test_a_compiled_model_returns_what_is_asked_for_after_a_plain_call(asked):
    torch.compiler.reset()
    model, _ = from_locality(model_of("convit_nano"))
    compiled, x = torch.compile(model, backend="eager"), torch.randn(1, 3, 8, 8)
    logits = compiled(x).logits
    output = compiled(x, **{asked: True})
    assert len(output[asked.removeprefix("output_")]) >= 4
    torch.testing.assert_close(output.logits, logits)
