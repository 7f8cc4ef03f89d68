"""transformers' continuous batching on "cupy_attention": the tokens of eager attention."""

import inspect
import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
initialization = pytest.importorskip("transformers.generation.continuous_batching.initialization")

from small_transformers import MODELS  # noqa: E402
from targets import GPU_TARGETS  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from transformers.generation.continuous_batching import continuous_api  # noqa: E402

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


PAGE, BEFORE = 4, (5, 2)  # tokens of a page, and those of each of two sequences in the cache
KIND = "full_attention"


class Cache17:
    """The pages of a layer, by the interface of transformers 5.17; 5.18 and 5.19 have others."""

    layer_index_to_group_indices = {0: (0, 0)}
    block_size, num_key_value_heads, head_dim = PAGE, 2, 8

    def __init__(self):
        rows = [torch.randn(5 * PAGE, 2, 8) for _ in range(2)]
        self.key_cache, self.value_cache = ([x] for x in rows)

    def update(self, key, value, layer, read_index, write_index):
        for rows, new in ((self.key_cache[layer], key), (self.value_cache[layer], value)):
            rows[write_index[0]] = new[0].transpose(0, 1)
        return self.key_cache[layer][read_index[0]], self.value_cache[layer][read_index[0]]


class Cache18(Cache17):
    layer_index_to_group_indices = None

    def get_cache_for_block_table(self, layer):
        return 0, *(x[layer].view(-1, PAGE, 2, 8) for x in (self.key_cache, self.value_cache))


class Cache19(Cache18):
    def update(self, key_states, value_states, layer_idx, kwargs):
        for name in ("cu_seq_lens_k", "max_length_k"):
            kwargs[name] = kwargs[name][KIND]
        if kwargs["block_table"] is not None:
            _, *pages = self.get_cache_for_block_table(layer_idx)
            kwargs["k_cache"], kwargs["v_cache"] = pages
            kwargs["block_table"] = kwargs["block_table"][0]
            return key_states, value_states
        where = kwargs["read_index"], kwargs["write_index"]
        whole = super().update(key_states, value_states, layer_idx, *where)
        return (x.transpose(0, 1)[None] for x in whole)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", [Cache17, Cache18, Cache19])
def test_caches_of_older_versions(kind, paged):
    """A new token of each of two sequences, by indices of rows and by a table of pages."""
    torch.manual_seed(0)
    cache, table = kind(), torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
    rows = [[int(table[b, j // PAGE]) * PAGE + j % PAGE for j in range(n + 1)]
            for b, n in enumerate(BEFORE)]  # fmt: skip
    q, k, v = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    expected = []
    for b in range(2):
        keys, values = (x[0][rows[b]].transpose(0, 1) for x in (cache.key_cache, cache.value_cache))
        keys[:, -1], values[:, -1] = k[0, :, b], v[0, :, b]
        keys, values = (x.repeat_interleave(2, 0) for x in (keys, values))
        one = torch.nn.functional.scaled_dot_product_attention(q[0, :, b, None], keys, values)
        expected.append(one[:, 0])
    name = "length" if kind is Cache19 else "seqlen"
    ends = torch.tensor([0, 6, 9], dtype=torch.int32)
    options = {"cache": cache, "cu_seq_lens_q": torch.tensor([0, 1, 2], dtype=torch.int32)}
    options |= {"cu_seq_lens_k": {KIND: ends}, f"max_{name}_q": 1, f"max_{name}_k": {KIND: 6}}
    options["read_index"] = [torch.tensor(rows[0] + rows[1])]
    options["write_index"] = [torch.tensor([rows[0][-1], rows[1][-1]])]
    options["block_table"] = table[None] if paged else None
    module = types.SimpleNamespace(layer_idx=0, sliding_window=None, is_causal=True)
    step = transformers_continuous.continuous_attention
    out, _ = step(ours.attention, module, q, k, v, None, **options)
    torch.testing.assert_close(out[0], torch.stack(expected), rtol=1e-5, atol=1e-5)
    for x, new in ((cache.key_cache, k), (cache.value_cache, v)):
        assert torch.equal(x[0][[rows[0][-1], rows[1][-1]]], new[0].transpose(0, 1))


@pytest.mark.parametrize("name", transformers_continuous.UNPAGED)
def test_what_block_tables_have_no_place_for(name):
    """Nothing that changes scores is lost on the way to the pages."""
    q, k = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 8)
    pages, table = torch.zeros(2, PAGE, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
    options = {"block_table": table, "k_cache": pages, "v_cache": pages.clone()}
    options |= {"read_index": [], "cu_seq_lens_k": torch.tensor([0, 1], dtype=torch.int32)}
    step = transformers_continuous.continuous_attention
    with pytest.raises(NotImplementedError, match=f"with a block table.*got {name}"):
        step(ours.attention, None, q, k, k, None, **options, **{name: torch.zeros(1)})


def test_the_second_name_is_for_continuous_batching(calls):
    model = small("llama")
    model.set_attn_implementation(CONTINUOUS)
    with pytest.raises(NotImplementedError, match=f'"{CONTINUOUS}" is for continuous batching'):
        model(torch.tensor([[1, 2, 3]], device=DEVICE))


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_buffers_are_filled_before_the_first_step(device, monkeypatch):
    """The stream that fills a manager's buffers has done so when the manager is made."""
    events = []
    manager = continuous_api.ContinuousBatchingManager

    class Manager(manager):
        """One of a version that has not been registered yet."""

        __init__ = object.__init__
        _cupyflash_switches = False
        model = types.SimpleNamespace(device=torch.device(device))

        def _create_batch_processor(self):
            events.append("filled")
            return "processor"

    def current_stream(which):
        return types.SimpleNamespace(synchronize=lambda: events.append(f"waited for {which}"))

    for owner, name in (
        (continuous_api.ContinuousMixin, "continuous_batching_context_manager"),
        (transformers.modeling_flash_attention_utils, "_lazy_imports"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(continuous_api, "ContinuousBatchingManager", Manager)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    for _ in range(2):
        transformers_continuous.register(ours.attention)
    assert Manager.__new__(Manager)._create_batch_processor() == "processor"
    assert events == ["filled"] + [f"waited for {device}"] * (device != "cpu")
    bare = type("Bare", (), dict.fromkeys(("__init__", "switch_to_cb_friendly_attn"), len))
    monkeypatch.setattr(continuous_api, "ContinuousBatchingManager", bare)
    transformers_continuous.register(ours.attention)  # of a version without the method


@pytest.mark.parametrize("step", ["_create_batch_processor", "eval"])
def test_a_manager_that_fails(step, monkeypatch):
    """A manager that cannot be made, or cannot warm up, leaves the model as it was."""
    model = small("llama")
    ours.register()
    model.set_attn_implementation(NAME)
    owner = model if step == "eval" else continuous_api.ContinuousBatchingManager

    def fail(*_):
        assert model.config._attn_implementation == CONTINUOUS
        raise MemoryError("no room")

    monkeypatch.setattr(owner, step, fail)
    with pytest.raises(MemoryError, match="no room"):
        model.generate_batch(PROMPTS, generation_config=GenerationConfig(max_new_tokens=NEW))
    assert model.config._attn_implementation == NAME
    model(torch.tensor([[1, 2, 3]], device=DEVICE))


def test_a_model_that_is_switched_back_under_its_manager():
    """Steps with a block table have new keys alone, which are not all that a query sees."""
    q, k = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 8)
    options = {"is_causal": True, "block_table": torch.zeros(1, 1, dtype=torch.int32)}
    with pytest.raises(NotImplementedError, match="block tables .* got Tensor"):
        ours.attention(torch.nn.Module(), q, k, k, None, **options)


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
