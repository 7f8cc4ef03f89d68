"""transformers' continuous batching on "cupy_attention": the tokens of eager attention."""

import inspect

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
initialization = pytest.importorskip("transformers.generation.continuous_batching.initialization")

from small_transformers import MODELS  # noqa: E402
from targets import GPU_TARGETS  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402

from cupyflash.integrations import transformers as ours  # noqa: E402
from cupyflash.integrations import transformers_continuous  # noqa: E402
from cupyflash.integrations.transformers_models import CONTINUOUS, NAME  # noqa: E402

NEWER = "page_size" in inspect.signature(ContinuousBatchingConfig).parameters
PAGE_SIZE = "page_size" if NEWER else "block_size"  # as transformers calls it
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [[5, 17, 80, 9, 33], list(range(3, 24)), [42]]
NEW = 6
computed = pytest.mark.skipif(
    DEVICE == "cuda" and not any("float32" in target.dtypes for target in GPU_TARGETS),
    reason="the models are in float32, which this forced backend does not compute",
)


def small(name):
    """A model with weights large enough that attention is not uniform."""
    config, kind, options = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
    return model.to(DEVICE)


def right_tokens(model):
    model.set_attn_implementation("eager")
    options = {"max_new_tokens": NEW, "do_sample": False}
    outs = [model.generate(torch.tensor([prompt], device=DEVICE), **options) for prompt in PROMPTS]
    return [out[0, len(prompt) :].tolist() for out, prompt in zip(outs, PROMPTS)]


def batched_tokens(model, name=NAME, **options):
    """Those of continuous batching on an implementation, which the model has again afterwards."""
    ours.register()
    model.set_attn_implementation(name)
    generation = GenerationConfig(
        max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    sizes = {PAGE_SIZE: 8, "num_blocks": 40, "max_batch_tokens": 16}
    outs = model.generate_batch(
        PROMPTS,
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**sizes | options),
        warmup=False,
    )
    assert model.config._attn_implementation == name
    return [out.generated_tokens for out in outs.values()]


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments of attention steps."""
    found, plain = [], transformers_continuous.continuous_attention

    def spied(*arguments, **options):
        found.append(options)
        return plain(*arguments, **options)

    ours.register()
    functions = transformers.AttentionInterface._global_mapping
    spy = lambda *arguments, **options: spied(ours.attention, *arguments, **options)
    monkeypatch.setitem(functions, CONTINUOUS, spy)
    return found


@computed
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gpt-oss"])
def test_generate_batch(name, calls):
    """Prompts longer than a batch are read in parts; windows and sinks are those of the model."""
    model = small(name)
    right = right_tokens(model)
    # transformers' own experts cannot become part of a CUDA graph.
    options = {"use_cuda_graph": False} if name == "gpt-oss" else {}
    assert batched_tokens(model, **options) == right
    tables = [options.get("block_table") is not None for options in calls]
    assert tables and not all(tables)
    assert DEVICE == "cuda" or not any(tables)  # a GPU takes them for steps of one token each


@computed
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_block_tables(name, calls, monkeypatch):
    """Steps of one token each read the pages themselves, as on a GPU."""
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *_: None)
    model = small(name)
    right = right_tokens(model)
    assert batched_tokens(model, max_blocks_per_request=8) == right
    with_table = [options for options in calls if options.get("block_table") is not None]
    assert 0 < len(with_table) < len(calls)


def test_the_second_name_is_for_continuous_batching(calls):
    model = small("llama")
    model.set_attn_implementation(CONTINUOUS)
    with pytest.raises(NotImplementedError, match=f'"{CONTINUOUS}" is for continuous batching'):
        model(torch.tensor([[1, 2, 3]], device=DEVICE))


def test_other_implementations_are_as_before():
    model = small("llama")
    right = right_tokens(model)
    assert batched_tokens(model, "eager") == batched_tokens(model, "sdpa") == right


def test_command(monkeypatch):
    """``serve`` gets the name, unless another one is asked for, and the server takes it."""
    from transformers.cli import transformers as cli
    from transformers.cli.serving.model_manager import ModelManager

    monkeypatch.setattr(ModelManager, "_validate_args", ModelManager._validate_args)
    monkeypatch.setattr(cli, "main", lambda: None)
    name = "--attn-implementation"
    for given, expected in (
        (["x", "serve", "m"], ["x", "serve", "m", name, NAME]),
        (["x", "serve", "m", name, "sdpa"], ["x", "serve", "m", name, "sdpa"]),
        (["x", "version"], ["x", "version"]),
    ):
        arguments = list(given)
        transformers_continuous.command(arguments)
        assert arguments == expected
    manager = ModelManager.__new__(ModelManager)
    manager.quantization, manager.attn_implementation = None, NAME
    manager._validate_args()
    assert manager.attn_implementation == NAME
    manager.attn_implementation = "no such name"
    with pytest.raises(ValueError, match="no such name"):
        manager._validate_args()
