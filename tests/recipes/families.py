"""Tiny genuine models of transformers 5, one for each family whose live names and hub names may differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

# Sizes under all the names that configurations give them; a name that a configuration does not have changes nothing.
TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28, "moe_shared_expert_intermediate_size": 28, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Attention through low ranks, as DeepSeek has it.
LATENT: dict[str, Any] = {
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 4,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_num_heads": 4, "mamba_n_heads": 4, "mamba_head_dim": 8, "mamba_d_head": 16, "mamba_d_state": 4,
    "mamba_n_groups": 2, "mamba_expand": 2, "ssm_state_size": 4, "n_groups": 2,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "image_size": 16, "patch_size": 8, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pooler_output_size": 32, "num_labels": 3,
}  # fmt: skip
# Vision towers, under the names of Qwen's configurations and of all others.
TOWER: dict[str, Any] = IMAGE | {
    "depth": 2, "embed_dim": 32, "num_heads": 4, "out_hidden_size": 32, "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0], "fullatt_block_indexes": [1], "spatial_merge_size": 2, "projection_dim": 32,
    "head_dim": 8, "mlp_dim": 40, "output_channels": 16, "global_attn_indexes": [1], "window_size": 2,
}  # fmt: skip
EAR: dict[str, Any] = {
    "num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 40, "d_model": 32,
    "output_dim": 32, "max_source_positions": 20, "downsample_hidden_size": 8, "hidden_size": 32,
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip

# Tokens for images, outside of the batches.
SPECIAL: dict[str, Any] = {
    key: 60 + number
    for number, key in enumerate(("image_token_id", "image_token_index", "video_token_id", "video_token_index"))
}
# Rotary embeddings of Qwen's vision-language models.
MROPE: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2],
        "partial_rotary_factor": 1.0},
}  # fmt: skip
# Text to speech of Qwen's omni models.
TALKER: dict[str, Any] = {
    "thinker_hidden_size": 32, "num_code_groups": 2, "accept_hidden_layer": 1, "text_config": TEXT | EXPERTS | MROPE,
    "code_predictor_config": TEXT | {"num_code_groups": 2}, "spatial_merge_size": 2,
}  # fmt: skip
VOCODER: dict[str, Any] = TEXT | {
    "codebook_size": 16, "num_quantizers": 2, "upsample_rates": [2, 2], "upsampling_ratios": [2], "decoder_dim": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What `transformers.AutoConfig.for_model` and the class of the model take."""

    model_type: str
    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    trains: bool = True
    """False if it has no `forward` of its own: a model of which only names and shapes are of interest."""


def _text(model_type: str, architecture: str, trains: bool = True, **config: Any) -> Family:
    return Family(model_type, architecture, TEXT | EXPERTS | config, trains)


def _image(model_type: str, architecture: str, trains: bool = True, **config: Any) -> Family:
    return Family(model_type, architecture, IMAGE | config, trains)


def _vision(
    model_type: str,
    architecture: str,
    text: str | dict[str, Any],
    vision: str | dict[str, Any] = "",
    trains: bool = True,
    **config: Any,
) -> Family:
    """A language model with a vision tower, each a model type or changes of its configuration."""
    towers = {
        key: base | (part if isinstance(part, dict) else {"model_type": part} if part else {})
        for key, base, part in (("text_config", TEXT | EXPERTS, text), ("vision_config", TOWER, vision))
    }
    return Family(model_type, architecture, towers | SPECIAL | {"tie_word_embeddings": False} | config, trains)


_LIST = [
    _text("qwen2_moe", "Qwen2MoeForCausalLM"),
    _text("qwen3_moe", "Qwen3MoeForCausalLM"),
    _text("qwen3_next", "Qwen3NextForCausalLM", **LINEAR),
    _text("deepseek_v2", "DeepseekV2ForCausalLM", **LATENT),
    _text("deepseek_v3", "DeepseekV3ForCausalLM", **LATENT),
    _text("deepseek_v32", "DeepseekV32ForCausalLM", **LATENT, index_n_heads=2, index_head_dim=8, index_topk=8),
    _text("glm4_moe", "Glm4MoeForCausalLM", first_k_dense_replace=1, partial_rotary_factor=0.5),
    _text("glm4_moe_lite", "Glm4MoeLiteForCausalLM", **LATENT),
    _text("glm_moe_dsa", "GlmMoeDsaForCausalLM", **LATENT, index_n_heads=2, index_head_dim=8, index_topk=8),
    _text("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1),
    _text("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", moe_topk=2, num_shared_expert=1),
    _text("olmoe", "OlmoeForCausalLM"),
    _text("flex_olmo", "FlexOlmoForCausalLM"),
    _text("exaone_moe", "ExaoneMoeForCausalLM", first_k_dense_replace=1),
    _text("dots1", "Dots1ForCausalLM", first_k_dense_replace=1, n_shared_experts=1),
    _text("longcat_flash", "LongcatFlashForCausalLM", **LATENT, num_layers=2, zero_expert_num=2,
        expert_ffn_hidden_size=24),
    _text("afmoe", "AfmoeForCausalLM", num_dense_layers=1),
    _text("cohere2_moe", "Cohere2MoeForCausalLM"),
    _text("solar_open", "SolarOpenForCausalLM", first_k_dense_replace=1),
    _text("mixtral", "MixtralForCausalLM", num_local_experts=4),
    _text("minimax", "MiniMaxForCausalLM", num_local_experts=4, layer_types=["linear_attention", "full_attention"]),
    _text("minimax_m2", "MiniMaxM2ForCausalLM", num_local_experts=4),
    _text("lfm2_moe", "Lfm2MoeForCausalLM", layer_types=["conv", "full_attention"], num_dense_layers=1),
    _text("jamba", "JambaForCausalLM", **MAMBA, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2),
    _text("nemotron_h", "NemotronHForCausalLM", **MAMBA, layers_block_type=["mamba", "attention", "moe"],
        num_hidden_layers=3),
    _text("gpt_oss", "GptOssForCausalLM", num_local_experts=4),
    _text("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", **LINEAR),
    _text("deepseek_v4", "DeepseekV4ForCausalLM", q_lora_rank=12, o_lora_rank=12, o_groups=2, head_dim=16,
        qk_rope_head_dim=4, index_n_heads=2, index_head_dim=8, index_topk=4, num_hidden_layers=3,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"]),
    _text("mellum", "MellumForCausalLM"),
    _text("phimoe", "PhimoeForCausalLM", num_local_experts=4),
    _text("granitemoe", "GraniteMoeForCausalLM", num_local_experts=4),
    _text("granitemoeshared", "GraniteMoeSharedForCausalLM", num_local_experts=4, shared_intermediate_size=28),
    _text("granitemoehybrid", "GraniteMoeHybridForCausalLM", **MAMBA, num_local_experts=4, shared_intermediate_size=28,
        layer_types=["mamba", "attention"]),
    _text("olmo_hybrid", "OlmoHybridForCausalLM", **LINEAR | {"linear_num_value_heads": 2}),
    _text("hy_v3", "HYV3ForCausalLM"),
    _text("laguna", "LagunaForCausalLM"),
    _text("axk1", "AXK1ForCausalLM", **LATENT),
    _text("axk2", "AXK2ForCausalLM", **LATENT),
    _text("flint", "FlintForCausalLM"),
    _text("kolibri1", "Kolibri1ForCausalLM"),
    _text("mimo_v2_flash", "MiMoV2FlashForCausalLM"),
    _text("beam", "BeamForCausalLM"),
    _text("hrm_text", "HrmTextForCausalLM"),
    _text("hy_v4", "HYV4ForCausalLM", **LATENT, index_n_heads=2, index_head_dim=8, index_topk=8),
    _text("gpt_neox", "GPTNeoXForCausalLM"),
    _image("vit", "ViTForImageClassification"),
    _image("deit", "DeiTForImageClassification"),
    _image("beit", "BeitForImageClassification", use_relative_position_bias=True),
    _image("audio-spectrogram-transformer", "ASTForAudioClassification", max_length=24, num_mel_bins=16),
    _image("vit_mae", "ViTMAEForPreTraining", decoder_hidden_size=16, decoder_num_attention_heads=4,
        decoder_num_hidden_layers=2, decoder_intermediate_size=24),
    _image("vit_msn", "ViTMSNForImageClassification"),
    _image("ijepa", "IJepaForImageClassification"),
    _image("vivit", "VivitForVideoClassification", num_frames=4, tubelet_size=[2, 8, 8]),
    _image("dinov2", "Dinov2ForImageClassification", use_swiglu_ffn=True),
    _image("dinov2_with_registers", "Dinov2WithRegistersForImageClassification", use_swiglu_ffn=True),
    _vision("qwen2_vl", "Qwen2VLForConditionalGeneration", MROPE),
    _vision("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", MROPE),
    _vision("qwen3_vl", "Qwen3VLForConditionalGeneration", MROPE),
    _vision("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", MROPE),
    _vision("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", LINEAR),
    _vision("glm4v_moe", "Glm4vMoeForConditionalGeneration", MROPE | {"first_k_dense_replace": 1}),
    _vision("llava", "LlavaForConditionalGeneration", "llama", "clip_vision_model"),
    _vision("llava_next", "LlavaNextForConditionalGeneration", "llama", "clip_vision_model"),
    _vision("llava_next_video", "LlavaNextVideoForConditionalGeneration", "llama", "clip_vision_model"),
    _vision("llava_onevision", "LlavaOnevisionForConditionalGeneration", "qwen2", "siglip_vision_model"),
    _vision("vipllava", "VipLlavaForConditionalGeneration", "llama", "clip_vision_model", vision_feature_layers=[0, 1]),
    _vision("video_llava", "VideoLlavaForConditionalGeneration", "llama", "clip_vision_model"),
    _vision("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text", "siglip_vision_model", mm_tokens_per_image=4),
    _vision("mistral3", "Mistral3ForConditionalGeneration", "mistral", "pixtral"),
    _vision("internvl", "InternVLForConditionalGeneration", "qwen2", "internvl_vision"),
    _vision("paligemma", "PaliGemmaForConditionalGeneration", "gemma", "siglip_vision_model", projection_dim=32),
    _vision("aya_vision", "AyaVisionForConditionalGeneration", "cohere2", "siglip_vision_model"),
    _vision("got_ocr2", "GotOcr2ForConditionalGeneration", "qwen2"),
    _vision("aria", "AriaForConditionalGeneration", "aria_text", "idefics3_vision"),
    _vision("mllama", "MllamaForConditionalGeneration", "mllama_text_model"),
    _vision("paddleocr_vl", "PaddleOCRVLForConditionalGeneration", MROPE),
    _vision("qwen2_5_omni_thinker", "Qwen2_5OmniThinkerForConditionalGeneration", MROPE, audio_config=EAR),
    _vision("qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerForConditionalGeneration", MROPE, audio_config=EAR),
    Family("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", {"thinker_config": {"text_config": TEXT | EXPERTS
        | MROPE, "vision_config": TOWER, "audio_config": EAR}, "talker_config": TALKER, "code2wav_config": VOCODER},
        trains=False),
    _vision("qwen2_audio", "Qwen2AudioForConditionalGeneration", "qwen2", audio_config=EAR),
    _vision("voxtral", "VoxtralForConditionalGeneration", "llama", audio_config=EAR, hidden_size=32),
    _vision("fuyu", "FuyuForCausalLM", "persimmon"),
    _vision("minimax_m3_vl", "MiniMaxM3SparseForConditionalGeneration", {"num_local_experts": 4, "index_n_heads": 2,
        "index_head_dim": 8, "shared_intermediate_size": 28, "dense_intermediate_size": 44, "index_block_size": 4,
        "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"]},
        projector_hidden_size=32, merged_hidden_size=48),
    _vision("pp_chart2table", "GotOcr2ForConditionalGeneration", "qwen2"),
    _vision("qianfan_ocr", "QianfanOCRForConditionalGeneration", "qwen3"),
    _vision("cosmos3_omni", "Cosmos3OmniForConditionalGeneration", MROPE),
    _vision("hunyuan_vl", "HunYuanVLForConditionalGeneration", MROPE, {"max_image_size": 16, "img_max_token_num": 16},
        interpolate_mode="bilinear"),
    _vision("audioflamingo3", "AudioFlamingo3ForConditionalGeneration", "qwen2", audio_config=EAR),
    _vision("glmasr", "GlmAsrForConditionalGeneration", "llama", audio_config=EAR),
    _vision("voxtral_realtime", "VoxtralRealtimeForConditionalGeneration", {}, audio_config=EAR),
    _text("kimi_linear", "KimiLinearForCausalLM", **LATENT, linear_head_dim=8, linear_num_heads=4,
        layer_types=["linear_attention", "full_attention"]),
    _text("bailing_hybrid", "BailingHybridForCausalLM", **LATENT, layer_types=["linear_attention", "full_attention"]),
    _text("aria_text", "AriaTextForCausalLM"),
    _text("esm", "EsmForMaskedLM"),
    _text("gte", "GteForMaskedLM"),
    _text("nomic_bert", "NomicBertForMaskedLM"),
    _text("jina_embeddings_v3", "JinaEmbeddingsV3ForMaskedLM"),
    _image("dinov3_vit", "DINOv3ViTModel", num_register_tokens=2),
    _image("radio", "RadioModel", max_img_size=16),
    _image("videomae", "VideoMAEForVideoClassification", num_frames=4, tubelet_size=2),
    _image("yolos", "YolosForObjectDetection", image_size=[16, 16]),
    Family("swin", "SwinForImageClassification", {"image_size": 16, "patch_size": 4, "embed_dim": 8, "depths": [2, 2],
        "num_heads": [2, 2], "window_size": 2, "num_labels": 3}),
    Family("segformer", "SegformerForImageClassification", {"num_encoder_blocks": 2, "depths": [2, 2],
        "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2],
        "num_attention_heads": [2, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "image_size": 16,
        "num_labels": 3}),
]  # fmt: skip
FAMILIES: dict[str, Family] = {family.model_type: family for family in _LIST}


def config(name: str, **changes: Any) -> Any:
    family = FAMILIES[name]
    made = transformers.AutoConfig.for_model(family.model_type, **(dict(family.config) | changes))
    if "tie_word_embeddings" in changes:
        # Some configurations take it at the top alone, others in the text model alone.
        for part in (made, made.get_text_config()):
            part.tie_word_embeddings = changes["tie_word_embeddings"]
    made.architectures = [family.architecture]
    return made


def build(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """The family's model in float32. Every float parameter and buffer differs from every other, so that swaps show."""
    torch.manual_seed(seed)
    model = getattr(transformers, FAMILIES[name].architecture)(config(name, **changes)).float().eval()
    scatter(model)
    return model


def scatter(model: torch.nn.Module) -> None:
    """Noise on every value: norms are not all ones any more, biases not all zeros."""
    with torch.no_grad():
        for tensor in {id(tensor): tensor for tensor in model.state_dict().values()}.values():
            if tensor.is_floating_point():
                tensor.nan_to_num_(0, 0, 0).add_(torch.randn_like(tensor), alpha=0.05)


def batch(model: Any, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Arguments of `forward`, with labels where the model's head has them."""
    chance = torch.Generator().manual_seed(seed)
    name, model_type = model.main_input_name, model.config.model_type
    tokens = torch.randint(3, 60, (2, 8), generator=chance)
    if model_type == "voxtral_realtime":
        # Eight frames of sound for each token.
        sound = torch.randn(2, model.config.audio_config.num_mel_bins, 64, generator=chance)
        return {"input_features": sound, "input_ids": tokens, "labels": tokens}
    if name == "input_ids":
        return {name: tokens, "labels": tokens}
    inputs = torch.randn(2, *_shape(model.config), generator=chance)
    if model_type == "vit_mae":
        # Its loss is that of the patches which this noise leaves out.
        return {name: inputs, "noise": torch.rand(2, 4, generator=chance)}
    has_labels = type(model).__name__.endswith("Classification")
    return {name: inputs, **({"labels": torch.tensor([0, 2])} if has_labels else {})}


def output(outputs: Any) -> torch.Tensor:
    """Logits, or the first output of a model that has none."""
    made: torch.Tensor = outputs.logits if "logits" in outputs else outputs[0]
    return made


def loss(outputs: Any) -> torch.Tensor:
    """What a training step minimizes; without labels the squares of the output."""
    made: torch.Tensor = outputs.loss if "loss" in outputs else output(outputs).float().square().mean()
    return made


def _shape(config: Any) -> tuple[int, ...]:
    match config.model_type:
        case "audio-spectrogram-transformer":
            return (config.max_length, config.num_mel_bins)
        case "vivit" | "videomae":
            return (config.num_frames, 3, config.image_size, config.image_size)
        case _:
            size = config.image_size
            return (3, *size) if isinstance(size, list) else (3, size, size)
