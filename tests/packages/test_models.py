"""Kinds of models that people use, in small: every tensor of a fresh one is the saved one's."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torchmetrics
import transformers
from torch import nn
from torchao import quantization as ao
from torchmetrics import Metric
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from holdfast import Checkpointer, HoldfastError, PlacementError
from tests.packages.snapshots import module_facts, snapshot, unlike

SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "type_vocab_size"), 2),
    **dict.fromkeys(("max_position_embeddings", "max_seq_len"), 64),
    "d_kv": 8,
    "head_dim": 8,
    "ffn_dim": 48,
    "moe_intermediate_size": 16,
    "vocab_size": 96,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Settings of a model's configuration, where it has them."""

FAMILIES = (
    "afmoe aimv2_vision_model albert apertus arcee aria_text audio-spectrogram-transformer bart "
    "beam beit bert bert-generation big_bird bigbird_pegasus biogpt bitnet blenderbot "
    "blip_2_qformer bloom bros camembert chinese_clip_vision_model clip_text_model codegen cohere "
    "convbert cosmos3_edge_text cwm data2vec-text deberta decision_transformer deit diffllama "
    "dinov2 doge dpr dpt electra ernie esmc eurobert exaone4 flaubert flex_olmo flint fnet "
    "fun_asr_nano_encoder gemma glm glm4 glm4_moe glm4v_moe_text glm_image_text glm_ocr_text "
    "glmasr_encoder gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_oss gptj gradium_phonon_tts granite gte "
    "helium hy_v3 hyperclovax ibert idefics3_vision ijepa imagegpt internlm3 iquestcoder jais2 "
    "jetmoe jina_embeddings_v3 kimi_k25_vision kolibri1 laguna lasr_encoder layoutlm lfm2 lfm3 "
    "lfm3_vl_vision lilt llama longformer longt5 m2m_100 marian mbart megatron-bert mellum "
    "mimo_v2_flash minicpm_ocr_vision minimax ministral3 mistral mixtral mlcd mlcd_vision_model "
    "modernbert molmo2_text moonshine moshi moss_transcribe_diarize_audio mpnet mpt mra mt5 "
    "muse_glimmer_assistant mvp nanochat nemotron3_5_transcribe_asr_audio nllb-moe nomic_bert "
    "nystromformer olmo olmo2 olmo3 olmoe openai-gpt opt patchtsmixer pegasus persimmon phi phi3 "
    "phimoe pixio pixtral plbart pocket_tts qianfan_ocr_vision qwen2 qwen3 rembert roberta "
    "roformer sam3_lite_text_text_model sapiens2 seed_oss siglip2_vision_model smollm3 "
    "smolvlm_vision solar_open speecht5 splinter squeezebert stablelm starcoder2 "
    "switch_transformers t5 tapas timesfm tipsv2_text_model udop ultrabert umt5 vaultgemma "
    "video_llama_3_vision vilt visual_bert vit vit_mae vitdet vivit voxtral_encoder wav2vec2-bert "
    "whisper xglm xlm xlm-roberta xmod yoso zamba "
)


def scrambled(module: nn.Module, seed: int) -> nn.Module:
    """Give every tensor of a module other values, buffers included, and set it to eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in {id(t): t for t in [*module.parameters(), *persistent(module)]}.values():
            if type(tensor) not in (torch.Tensor, nn.Parameter):
                continue
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.1)
            elif tensor.dtype is not torch.bool:
                tensor.copy_(torch.randint(0, 2, tensor.shape, generator=generator))
    return module.eval()


def persistent(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the buffers that a state dict has."""
    for inner in module.modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None and name not in inner._non_persistent_buffers_set:
                yield buffer


def differences(
    root: Path, make: Callable[[int], nn.Module], run: Callable[[Any], Any] | None = None
) -> list[str]:
    """Return what differs between a saved module and a fresh one that loads it."""
    true, twin = make(1), make(2)
    checkpointer = Checkpointer(root)
    try:
        before = module_facts(true)
        checkpointer.save(1, {"model": true})
        report = checkpointer.load({"model": twin})
        checkpointer.save(2, {"model": twin})
    finally:
        shutil.rmtree(root, ignore_errors=True)
    wrong = [f"the save: {path}" for path in unlike(before, module_facts(true))]
    wrong += unlike(before, module_facts(twin))
    wrong += [f"not loaded: {name}" for name in (*report.handed_over, *report.missing)]
    if run is not None and not wrong:
        torch.manual_seed(0)
        one = run(true)
        torch.manual_seed(0)
        if not torch.equal(one, run(twin)):
            wrong.append("its output")
    return wrong


def findings(cases: Iterator[tuple[str, list[str]]]) -> tuple[int, list[str]]:
    """Return how many cases there were and what was wrong with them."""
    names, wrong = [], []
    for name, found in cases:
        names.append(name)
        wrong += [f"{name}: {each}" for each in found]
    return len(names), wrong


def from_config(family: str, seed: int) -> nn.Module:
    """A small model of a family of transformers, with random weights."""
    config = CONFIG_MAPPING[family]()
    for name, value in SMALL.items():
        if type(getattr(config, name, None)) is int:
            setattr(config, name, value)
    if "layer_types" in vars(config):
        config.layer_types = config.layer_types[:2]
    torch.manual_seed(seed)
    return scrambled(transformers.AutoModel.from_config(config), seed)


def check_families(root: Path, families: list[str]) -> None:
    count, wrong = findings(
        (family, differences(root, partial(from_config, family))) for family in families
    )
    assert not wrong, "\n".join(wrong)
    assert count == len(families)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_families_of_transformers(tmp_path: Path) -> None:
    """R1, O1: every tensor of an architecture, and who is tied to whom; nightly of all."""
    check_families(tmp_path / "root", FAMILIES.split()[::4])


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_more_than_a_hundred_families_of_transformers(tmp_path: Path) -> None:
    """R1, O1."""
    assert len(FAMILIES.split()) >= 100
    check_families(tmp_path / "root", FAMILIES.split())


ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
WORDS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
ADAPTERS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lambda: peft.LoraConfig(**ATTENTION, modules_to_save=["lm_head"]),
    "LoRA of embeddings": lambda: peft.LoraConfig(target_modules=["embed_tokens"], bias="all"),
    "DoRA": lambda: peft.LoraConfig(**ATTENTION, use_dora=True, use_rslora=True),
    "AdaLoRA": lambda: peft.AdaLoraConfig(**ATTENTION, total_step=10),
    "IA3": lambda: peft.IA3Config(**ATTENTION, feedforward_modules=[]),
    "LoHa": lambda: peft.LoHaConfig(**ATTENTION),
    "LoKr": lambda: peft.LoKrConfig(**ATTENTION),
    "OFT": lambda: peft.OFTConfig(**ATTENTION, oft_block_size=8),
    "BOFT": lambda: peft.BOFTConfig(**ATTENTION, boft_block_size=4),
    "VeRA": lambda: peft.VeraConfig(**ATTENTION, r=4),
    "RandLoRA": lambda: peft.RandLoraConfig(**ATTENTION, r=4),
    "VB-LoRA": lambda: peft.VBLoRAConfig(**ATTENTION, num_vectors=8, vector_length=16, topk=2),
    "FourierFT": lambda: peft.FourierFTConfig(**ATTENTION, n_frequency=16),
    "HRA": lambda: peft.HRAConfig(**ATTENTION),
    "MiSS": lambda: peft.MissConfig(**ATTENTION, r=8),
    "C3A": lambda: peft.C3AConfig(**ATTENTION, block_size=8),
    "SHiRA": lambda: peft.ShiraConfig(**ATTENTION, r=4),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "prompt": lambda: peft.PromptTuningConfig(**WORDS),
    "prefix": lambda: peft.PrefixTuningConfig(**WORDS),
    "P-tuning": lambda: peft.PromptEncoderConfig(**WORDS, encoder_hidden_size=16),
}


def adapted(config: Callable[[], peft.PeftConfig], seed: int) -> nn.Module:
    sizes = {name: SMALL[name] for name in ("hidden_size", "intermediate_size", "vocab_size")}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(seed)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **layers))
    return scrambled(peft.get_peft_model(base, config()), seed)


def words(model: Any) -> torch.Tensor:
    return model(input_ids=torch.arange(3, 11)[None])[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_peft(tmp_path: Path) -> None:
    """R1, O1: adapters with what they are around, and what the model then says."""
    _, wrong = findings(
        (name, differences(tmp_path / "root", partial(adapted, config), words))
        for name, config in ADAPTERS.items()
    )
    assert not wrong, "\n".join(wrong)


QUANTISED: tuple[Callable[[], Any], ...] = (
    ao.Int8WeightOnlyConfig,
    ao.Int8DynamicActivationInt8WeightConfig,
    ao.Int8DynamicActivationIntxWeightConfig,
    ao.IntxWeightOnlyConfig,
    ao.Float8WeightOnlyConfig,
)


def quantised(config: Callable[[], Any], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    ao.quantize_(module, config())
    return module


@pytest.mark.slow
@pytest.mark.parametrize("config", QUANTISED)
def test_quantised_weights_of_torchao_are_refused(tmp_path: Path, config: Any) -> None:
    """O11: the bytes of such a subclass are not its value."""
    with pytest.raises(HoldfastError, match=r"model\.0\.weight: a tensor subclass"):
        differences(tmp_path / "root", partial(quantised, config))


TASKS: tuple[dict[str, Any], ...] = (
    {},
    {"task": "multiclass", "num_classes": 3},
    {"num_classes": 3},
    {"num_outputs": 1},
)


def metrics() -> Iterator[tuple[str, Callable[[], Metric]]]:
    """Yield what builds each metric that a few simple arguments are enough for."""
    for name in dir(torchmetrics):
        kind = getattr(torchmetrics, name)
        if not (isinstance(kind, type) and issubclass(kind, Metric)):
            continue
        for options in TASKS:
            try:
                updated(kind(**options))
            except Exception:
                continue
            yield name, partial(kind, **options)
            break


def updated(metric: Metric) -> Metric:
    """Return a metric that has seen some data."""
    draw = torch.Generator().manual_seed(1)
    scores, classes = torch.rand(8, 3, generator=draw), torch.randint(0, 3, (8,), generator=draw)
    two = torch.randint(0, 2, (8,), generator=draw)
    for data in (
        (scores[:, 0], scores[:, 1]),
        (scores[:, 0], two),
        (scores.softmax(-1), classes),
        (scores[:, 0],),
        (["a b c"], ["a b d"]),
    ):
        try:
            metric.reset()
            metric.update(*data)
            metric.update(*copy.deepcopy(data))
        except Exception:
            continue
        return metric
    raise ValueError("no data fits")


def kept_metric(root: Path, make: Callable[[], Metric]) -> list[str]:
    """Return what is wrong with a metric: refused while it states nothing, else kept."""
    metric, twin = updated(make()), make()
    checkpointer = Checkpointer(root)
    wrong = []
    try:
        checkpointer.save(1, {"metric": metric})
        wrong.append("it is not refused")
    except PlacementError as error:
        wrong += [] if "persistent(True)" in str(error) else [str(error)]
    metric.persistent(True)
    twin.persistent(True)
    checkpointer.save(2, {"metric": metric})
    checkpointer.load({"metric": twin})
    shutil.rmtree(root)
    return wrong + unlike(snapshot(metric.metric_state), snapshot(twin.metric_state))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_metrics_of_torchmetrics(tmp_path: Path) -> None:
    """R2, O3: a metric is refused while its state dict is empty, and kept when it is persistent."""
    count, wrong = findings(
        (name, kept_metric(tmp_path / "root", make)) for name, make in metrics()
    )
    assert not wrong, "\n".join(wrong)
    assert count >= 50
