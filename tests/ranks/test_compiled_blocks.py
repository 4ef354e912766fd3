"""Compiled blocks: equal to the plain loop, one compilation for like blocks, none over the
steps, and what runs as it is.
"""

import copy
import gc
import weakref
from types import MethodType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import hf_zero
from hf_zero.activations import compile as compilation
from hf_zero.activations import policy as attention
from hf_zero.errors import ConfigError
from tests.helpers import oracle
from tests.helpers.cells import in_one_item, in_turn
from tests.helpers.engines import OnEngine, config_of, engine_opener, start, train_on_threads
from tests.helpers.models import ARCHITECTURES, Stack, features, llama, seeded, tokens
from tests.helpers.training import ArchitectureJob, Plan, plain_sgd

BLOCKS = {"blocks": True, "backend": "aot_eager"}  # what inductor is given too, without a compiler
TRACED = {"blocks": True, "backend": "eager"}  # runs what was traced as it is


def nothing_is_compiled():
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    nothing_is_compiled()
    yield
    torch._dynamo.reset()


def graphs():
    """Compilations so far."""
    return counters["stats"]["unique_graphs"]


def opened(model, stage, **section):
    return start(model, plain_sgd(model), config_of(stage, compile=section))


class Compiled(ArchitectureJob):
    """Recomputes its blocks, and evaluates other shapes before each micro-batch."""

    def build(self):
        model = super().build()
        model.gradient_checkpointing_enable()
        return model

    def loss(self, net, at):
        net.module.eval()
        with torch.no_grad():
            net(input_ids=tokens(at.step, at.micro, at.rank)[:1, :4])
        net.module.train()
        return net(**self.batch(at), use_cache=False).loss


def test_equal_to_the_plain_loop_with_one_compilation_for_all_blocks_and_steps():
    job, plan = Compiled(ARCHITECTURES["gpt2"]), Plan(1, 2, 2, "bf16")
    job.name = "gpt2, evaluated and recomputed"
    got = train_on_threads(job, plan, engine_opener(3, compile=BLOCKS))
    assert graphs() == 1
    oracle.accept(got, job, plan, 3)


class Dropping(nn.Module):
    """Checkpoints itself around its call, or inside its forward, as transformers does."""

    def __init__(self, inside):
        super().__init__()
        self.scale = nn.Linear(16, 16, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.inside = inside

    def __call__(self, x):
        call = super().__call__
        return call(x) if self.inside else checkpoint(call, x, use_reentrant=False)

    def work(self, x):
        return self.dropout(self.scale(x))

    def forward(self, x):
        return checkpoint(self.work, x, use_reentrant=False) if self.inside else self.work(x)


@in_turn("inside", [False, True])
def test_dropout_is_recomputed_as_it_was(inside):
    nothing_is_compiled()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Dropping(inside) for _ in range(2))

        def forward(self, x):
            return [block(x) for block in self.blocks]

    engine = opened(model := seeded(Model), 3, **BLOCKS)
    outputs = engine(torch.rand(32, 16).requires_grad_())
    engine.backward(sum(output.sum() for output in outputs))
    for block, output in zip(model.blocks, outputs):
        weight = hf_zero.safe_get_full_fp32_param(block.scale.weight)
        grad = hf_zero.safe_get_full_grad(block.scale.weight)
        # The output is linear in each row of the weight, so the gradient gives it back where the
        # same elements were dropped.
        torch.testing.assert_close((weight * grad).sum(1), output.sum(0))
        assert 0.3 < (output == 0).float().mean() < 0.7
    assert graphs() == 1
    engine.destroy()


def test_generation_evaluation_and_training_with_a_cache_are_not_compiled(heard):
    engine = opened(model := seeded(llama), 3, **TRACED)
    model.eval()
    want = seeded(llama).eval().generate(tokens(0, 0, 0), max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(tokens(0, 0, 0), max_new_tokens=4, do_sample=False), want)
    with torch.no_grad():
        engine(input_ids=tokens(0, 0, 0))
    model.train()
    for number in range(2):
        engine(input_ids=tokens(number, 0, 0), use_cache=True).logits.sum().backward()
    assert graphs() == 0
    said = [message for message in heard if "use_cache=False" in message]
    assert len(said) == 1 and "LlamaDecoderLayer is given a DynamicCache" in said[0]
    engine.destroy()


def test_what_transformers_records_inside_blocks_is_recorded(heard):
    plain = seeded(ARCHITECTURES["bert"].make)
    engine = opened(model := seeded(ARCHITECTURES["bert"].make), 3, **TRACED)
    for each in (plain, model):
        each.set_attn_implementation("eager")
    engine(tokens(0, 0, 0)).logits.sum().backward()
    assert graphs() == 1
    got, want = (
        net(tokens(0, 0, 0), output_attentions=True, output_hidden_states=True)
        for net in (engine, plain)
    )
    assert len(got.attentions) == 2
    for each in ("attentions", "hidden_states"):
        torch.testing.assert_close(got[each], want[each])
    assert [message.partition(",")[0] for message in heard] == [
        "BertLayer has hooks on modules inside it"
    ]
    engine.destroy()


def doubled(self, x):
    return 2 * type(self).forward(self, x)


def test_blocks_are_given_back_with_the_forward_that_they_had():
    engine = opened(model := seeded(Stack), 2, **TRACED)
    copied = copy.deepcopy(model)
    assert all("forward" in vars(block) for block in model.blocks)
    assert all(block.forward.__self__ is block for block in copied.blocks)
    torch.testing.assert_close(copied(features(0, 0, 0)), model(features(0, 0, 0)))
    engine.destroy()
    assert not any("forward" in vars(block) for block in model.blocks)

    nothing_is_compiled()
    plain = seeded(Stack)
    for block in (*plain.blocks, *model.blocks):
        block.forward = MethodType(doubled, block)
    engine = opened(model, 2, **TRACED)
    torch.testing.assert_close(engine(features(0, 0, 0)), plain(features(0, 0, 0)))
    assert graphs() == 1
    said = r"a Block whose forward was replaced .* copy the model before hf_zero.initialize"
    with pytest.raises(ConfigError, match=said):
        copy.deepcopy(model)
    engine.destroy()
    assert all(block.forward.__func__ is doubled for block in model.blocks)


def test_the_limit_on_recompilations_comes_back_with_the_last_engine():
    limits = torch._dynamo.config
    for before, raised in ((3, compilation.GRAPHS), (100, 100)):
        for ends in (0, 1), (1, 0):
            with limits.patch(recompile_limit=before):
                engines = [opened(seeded(Stack), 2, **TRACED) for _ in range(2)]
                engines[ends[0]].destroy()
                assert limits.recompile_limit == raised
                engines[ends[1]].destroy()
                assert limits.recompile_limit == before


def test_the_limit_on_recompilations_comes_back_after_an_engine_that_was_only_collected():
    limits = torch._dynamo.config
    with limits.patch(recompile_limit=3):
        engine = opened(seeded(Stack), 2, **TRACED)
        assert limits.recompile_limit == compilation.GRAPHS
        left = weakref.ref(engine)
        del engine
        gc.collect()
        assert left() is None
        assert limits.recompile_limit == 3


def test_blocks_that_read_parameters_of_others_are_left_alone(heard):
    class Tied(Stack):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.down.weight = self.blocks[0].down.weight

    engine = opened(seeded(Tied), 3, **TRACED)
    torch.testing.assert_close(engine(features(0, 0, 0)), seeded(Tied)(features(0, 0, 0)))
    assert graphs() == 0
    assert any("finds nothing to compile" in message for message in heard)
    engine.destroy()


def compiled_before(**asked):
    def compile_it(model):
        model.blocks[1].compile(**asked)

    return compile_it


def forward_compiled_before(model):
    model.blocks[1].forward = torch.compile(model.blocks[1].forward, backend="cudagraphs")


def wrapped_before(model):
    model.blocks[1] = torch.compile(model.blocks[1], mode="max-autotune")


def captured_before(model):
    def replay(x): ...

    replay.__module__ = "torch.cuda.graphs"  # as torch.cuda.make_graphed_callables leaves it
    model.blocks[1].forward = replay


def as_it_is(model): ...


MOVES = r".* stage 3 gathers parameters into new memory"
GRAPHS = f"torch.compile of blocks.1{MOVES}"


@in_one_item(
    [
        (compiled_before(mode="reduce-overhead"), {}, GRAPHS),
        (compiled_before(backend="cudagraphs"), {}, GRAPHS),
        (compiled_before(options={"triton.cudagraphs": True}), {}, GRAPHS),
        (forward_compiled_before, {}, GRAPHS),
        (wrapped_before, {}, GRAPHS),
        (captured_before, {}, f"make_graphed_callables of blocks.1{MOVES}"),
        (as_it_is, {"backend": "cudagraphs"}, f"backend='cudagraphs'{MOVES}"),
        (as_it_is, {"backend": "inductr"}, r"compile.backend = 'inductr' .*inductor"),
        (as_it_is, {"backend": "eager", "mode": "max-autotune-no-cudagraphs"}, "compile.mode = "),
    ]
)
def test_what_is_refused_where_parameters_move(case):
    """CUDA graphs, of blocks or of all; and what torch cannot compile with."""
    before, section, said = case
    model = seeded(Stack)
    before(model)
    more = {"compile": {"blocks": True, **section}} if section else {}
    with pytest.raises(ConfigError, match=said):
        start(model, plain_sgd(model), config_of(3, **more))
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    if before is captured_before:  # to addresses that every engine gives up
        with pytest.raises(ConfigError, match=r"blocks\.1 has recorded .* call it after hf_zero"):
            start(model, plain_sgd(model), config_of(2))
    else:
        start(model, plain_sgd(model), config_of(2)).destroy()  # their addresses stay


def test_compile_called_for_cuda_graphs_is_refused_where_parameters_move():
    asking = {
        "mode='reduce-overhead'": {"mode": "reduce-overhead"},
        "mode='max-autotune'": {"compile_kwargs": {"mode": "max-autotune"}},
        "options=": {"options": {"triton.cudagraphs": True}},
        "backend='cudagraphs'": {"backend": "cudagraphs"},
    }
    engine = start(model := seeded(Stack), plain_sgd(model), config_of(3))
    for said, asked in asking.items():
        with pytest.raises(ConfigError, match=said):
            engine.compile(**asked)
        if "compile_kwargs" not in asked:
            with pytest.raises(ConfigError, match=said):
                model.blocks[0].compile(**asked)
    with torch._inductor.config.patch("triton.cudagraphs", True):
        with pytest.raises(ConfigError, match="TORCHINDUCTOR_CUDAGRAPHS"):
            engine.compile()
        engine.compile(options={"triton.cudagraphs": False})
    engine.compile(mode="max-autotune-no-cudagraphs")
    engine.destroy()
    engine = start(model, plain_sgd(model), config_of(2))
    for asked in asking.values():
        engine.compile(**asked)  # nothing is compiled before it is called
    engine.destroy()


def by_the_engine(engine):
    engine.compile(backend="eager")
    engine.compile(backend="aot_eager", compile_kwargs={"dynamic": False})


def in_place(engine):
    engine.module.compile(backend="aot_eager")


@in_turn("ask", [by_the_engine, in_place])
def test_compile_called_by_a_script(ask):
    nothing_is_compiled()
    engine = start(model := seeded(Stack), plain_sgd(model), config_of(3))
    ask(engine)
    engine(features(0, 0, 0)).sum().backward()
    assert graphs() == 1
    engine.destroy()
    assert not any({"compile", "forward"} & set(vars(module)) for module in model.modules())


def test_modules_compiled_in_place_keep_their_hooks_outside():
    """As Accelerate's regional compilation does, with every block and other modules."""
    job, plan = ArchitectureJob(ARCHITECTURES["bert"]), Plan(steps=2)

    def opener(model, optimizer, plan):
        engine = start(model, optimizer, config_of(3, plan))
        for module in (
            *model.bert.encoder.layer,
            model.bert.embeddings.LayerNorm,
            model.bert.embeddings.word_embeddings,
        ):
            module.compile(backend="eager")
        return OnEngine(engine, plan)

    got = train_on_threads(job, plan, opener)
    assert (graphs(), sum(counters["graph_break"].values())) == (3, 0)
    oracle.compare(got, oracle.kept(job, plan))


def test_a_block_that_compiles_in_parts_is_named(heard):
    class Breaking(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x.relu()

    model = seeded(Stack)
    for block in model.blocks:
        block.breaking = Breaking()
        forward = block.forward
        block.forward = lambda x, block=block, forward=forward: block.breaking(forward(x))
    engine = opened(model, 3, **TRACED)
    engine(features(0, 0, 0)).sum().backward()
    [message] = [message for message in heard if "in parts" in message]
    assert message.startswith("Block ") and "TORCH_LOGS=graph_breaks" in message
    engine.destroy()


@in_turn("theirs", [False, True])
def test_attention_comes_first_as_configured_until_the_engine_ends(theirs):
    """An order that somebody else has set since stays."""
    before, tag = torch._C._get_sdp_priority_order(), torch.compiler.config.cache_key_tag
    model = seeded(Stack)
    engine = start(model, plain_sgd(model), config_of(0, attention_backend="cudnn"))
    cudnn = int(torch.nn.attention.SDPBackend.CUDNN_ATTENTION)
    others = [each for each in before if each != cudnn]
    assert torch._C._get_sdp_priority_order() == [cudnn, *others]
    # else a graph in torch's cache on disk would come back with the backend of another run
    assert torch.compiler.config.cache_key_tag == f"{tag} attention=cudnn"
    try:
        if theirs:
            torch._C._set_sdp_priority_order(before[::-1])
        engine.destroy()
        assert torch._C._get_sdp_priority_order() == (before[::-1] if theirs else before)
        assert torch.compiler.config.cache_key_tag == tag
    finally:
        torch._C._set_sdp_priority_order(before)


def test_auto_takes_what_was_measured_on_such_a_gpu(monkeypatch):
    hopper = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(attention.kinds, "properties", lambda device: hopper)
    gpu = torch.device("cuda")
    assert attention.chosen("auto", gpu) == attention.MEASURED.get((9, 0), "auto")
    monkeypatch.setattr(attention, "MEASURED", {(9, 0): "cudnn"})
    assert attention.chosen("auto", gpu) == "cudnn" and attention.chosen("flash", gpu) == "flash"
    assert attention.chosen("auto", torch.device("cpu")) == "auto"
    hopper.major = 8
    assert attention.chosen("auto", gpu) == "auto"
