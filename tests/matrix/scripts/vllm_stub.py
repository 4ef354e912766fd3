"""A stub of vLLM for TRL's own client and its colocated mode: one process, no GPU.

The model starts as zeros, so that what it generates shows the weights that it was sent. The server
checks the tensors of an update: announced ones, in their order, each of the model's once.
"""

from __future__ import annotations

import importlib.machinery
import json
import queue
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig
from trl_drawing import GROUP, DrawingLlama

TRANSFER = "vllm.distributed.weight_transfer"
BUILTIN = ("vllm", "vllm.sampling_params", "vllm.utils", "vllm.utils.network_utils")
BUILTIN += ("vllm.distributed", TRANSFER, f"{TRANSFER}.nccl_common", f"{TRANSFER}.packed_tensor")
RELEASE = (0, 28, 0)
Values = types.SimpleNamespace


def tokenizer_of(folder: str) -> Any:
    """Without special tokens: TRL's online DPO trainer tokenizes prompts of a server again."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    tokenizer.backend_tokenizer.post_processor = plain
    return tokenizer


class Generator:
    """A model that draws completions, and the weights that it was sent."""

    def __init__(self, folder: str):
        self.tokenizer = tokenizer_of(folder)
        self.model = DrawingLlama(LlamaConfig.from_pretrained(folder)).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self.came: list[str] = []  # in the update under way
        self.updates = 0

    @torch.no_grad()
    def load_weights(self, named: Any) -> None:
        for name, value in named:
            parameter = self.model.get_parameter(name)
            assert tuple(value.shape) == self.shapes[name], name
            assert value.dtype == parameter.dtype, name
            assert name not in self.came, f"{name} was sent twice"
            self.came.append(name)
            parameter.copy_(value)

    def complete(self) -> None:
        assert set(self.came) == set(self.shapes)
        self.came = []
        self.updates += 1

    @torch.no_grad()
    def draw(
        self, prompt: list[int], members: int, length: int, temperature: float
    ) -> list[list[int]]:
        """Completions of one prompt, each with the end that the model gave it."""
        assert self.updates, "generation before the first weights"
        ids = torch.tensor([prompt] * members)
        end, pad = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        made = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=True,
            top_k=0, temperature=temperature, synced_gpus=False, pad_token_id=pad,
            eos_token_id=end,
        )  # fmt: skip
        rows = [row[len(prompt) :].tolist() for row in made]
        return [row[: row.index(end) + 1] if end in row else row for row in rows]


# ---- colocated ----


class LLM:
    """One in each process, of all that were made."""

    made: list[LLM] = []

    def __init__(self, model: str, **options: Any):
        self.generator = Generator(model)
        runner = Values(model_runner=Values(model=self.generator))
        self.llm_engine = Values(model_executor=Values(driver_worker=runner))
        LLM.made.append(self)

    def reset_prefix_cache(self) -> None:
        self.generator.complete()

    def generate(self, prompts: list[Any], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        tokenizer, count, made = self.generator.tokenizer, sampling_params.n, {}
        outputs = []
        for each in prompts:
            ids = each["prompt_token_ids"] if isinstance(each, dict) else tokenizer(each).input_ids
            if str(ids) not in made:
                asked = (sampling_params.max_tokens, sampling_params.temperature)
                made[str(ids)] = iter(self.generator.draw(list(ids), max(GROUP, count), *asked))
            drawn = [Values(token_ids=next(made[str(ids)])) for _ in range(count)]
            for one in drawn:
                one.logprobs = [{t: Values(rank=1, logprob=0.0)} for t in one.token_ids]
            outputs.append(Values(prompt_token_ids=list(ids), outputs=drawn))
        return outputs


class SamplingParams:
    def __init__(self, n: int, max_tokens: int, temperature: float, **options: Any):
        self.n, self.max_tokens, self.temperature = n, max_tokens, temperature


# ---- a server ----


class Server(ThreadingHTTPServer):
    """A server in a thread of rank 0; tensors arrive through :attr:`wire`."""

    def __init__(self, folder: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.generator = Generator(folder)
        self.wire: queue.Queue[Any] = queue.Queue()
        self.paths: list[str] = []
        self.daemon_threads = True
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        config = {
            "weight_transfer_config": {"backend": "nccl"},
            "model_config": {"logprobs_mode": "processed_logprobs"},
        }
        answers = {
            "/health": {},
            "/v1/models": {"data": [{"id": "stub"}]},
            "/server_info": {"vllm_config": config},
            "/get_world_size": {"world_size": 1},
        }
        self._answer(answers[path])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        given = json.loads(body) if body else {}
        self.server.paths.append(self.path)
        self._answer(getattr(self, self.path.strip("/").replace("/", "_"))(given))

    def start_weight_update(self, given: Any) -> Any:
        assert not self.server.generator.came
        return {}

    def update_weights(self, given: Any) -> Any:
        info = given["update_info"]
        announced = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
        for name, dtype, shape in announced:
            sent, value = self.server.wire.get(timeout=60)
            assert (sent, str(value.dtype), list(value.shape)) == (name, f"torch.{dtype}", shape)
            self.server.generator.load_weights([(name, value)])
        assert self.server.wire.get(timeout=60) is None, "more tensors than were announced"
        return {}

    def finish_weight_update(self, given: Any) -> Any:
        self.server.generator.complete()
        return {}

    def reset_prefix_cache(self, given: Any) -> Any:
        return {"success": True}

    def v1_completions(self, given: Any) -> Any:
        generator, choices = self.server.generator, []
        for prompt in given["prompt"]:
            ids = generator.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
            for row in generator.draw(ids, given["n"], given["max_tokens"], given["temperature"]):
                names = [f"token_id:{token}" for token in row]
                logprobs = {"tokens": names, "token_logprobs": [0.0] * len(row)}
                logprobs["top_logprobs"] = [{name: 0.0} for name in names]
                choices.append({"prompt_token_ids": ids, "token_ids": row, "logprobs": logprobs})
        return {"choices": choices}


def _send(iterator: Any, group: Server, src: int, post_iter_func: Any) -> None:
    """Send packed tensors as vLLM does: several at a time, and after all of them are taken."""
    pack = []
    for item in iterator:
        pack.append((item[0], post_iter_func(item)))
        if len(pack) == 7:
            for each in pack:
                group.wire.put(each)
            pack = []
    for each in [*pack, None]:
        group.wire.put(each)


def install() -> None:
    """Make ``import vllm`` find this stub. Call it before TRL's trainers are imported."""
    for name in BUILTIN:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module
    names = {"LLM": LLM, "SamplingParams": SamplingParams, "RequestOutput": object}
    sys.modules["vllm"].__dict__.update(names)
    sys.modules["vllm.sampling_params"].StructuredOutputsParams = object
    sys.modules["vllm.utils.network_utils"].get_ip = lambda: "127.0.0.1"
    sys.modules[f"{TRANSFER}.nccl_common"].trainer_init = None
    sys.modules[f"{TRANSFER}.packed_tensor"].packed_nccl_broadcast_producer = _send

    from trl import import_utils

    import_utils.is_vllm_available = lambda min_version=None: (
        min_version is None or tuple(map(int, min_version.split("."))) <= RELEASE
    )
    from trl.generation import vllm_client

    def init_communicator(self: Any, device: Any = 0) -> None:
        self.communicator = serving[self.base_url]

    vllm_client.VLLMClient.init_communicator = init_communicator
    found = torch.accelerator.current_accelerator

    def current_accelerator(*args: Any, **options: Any) -> Any:
        """The online DPO trainer needs some device for its client."""
        asks = sys._getframe(1).f_globals["__name__"]
        return torch.device("cpu") if "online_dpo" in asks else found(*args, **options)

    torch.accelerator.current_accelerator = current_accelerator


serving: dict[str, Server] = {}


def serve(folder: str) -> Server:
    server = Server(folder)
    serving[server.url] = server
    return server
