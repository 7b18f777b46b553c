"""The zoo models that coverage is measured on, as data: what they are called and how small their input may be."""

from __future__ import annotations

__all__ = ["TIMM", "is_one_more", "timm_models", "torchvision_classifiers"]

#: Smaller than any stage of these networks needs; enough for five halvings.
_SMALL = 64

#: torchvision classifiers that need more than `_SMALL` pixels, or take one size only (None: the declared one).
_TORCHVISION_SIZES: dict[str, int | None] = {
    "alexnet": 96,
    "inception_v3": 128,
    "vgg11": 64,
    "vit_b_16": None,
    "vit_b_32": None,
    "vit_h_14": None,
    "vit_l_16": None,
    "vit_l_32": None,
    "maxvit_t": None,
}

#: The smallest torchvision model of each family; the others are run for fewer columns (`coverage_case.SHORT`).
_FIRST = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3"),
    *("maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18"),
    *("resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "swin_t", "swin_v2_t", "vgg11"),
    *("vgg11_bn", "vit_b_16", "wide_resnet50_2"),
)

#: Family -> (small model of it, side of the input in pixels; None: the declared size, which the model insists on).
#: Every module of `timm.models` is there, and the families that share one.
TIMM: dict[str, tuple[str, int | None]] = {
    "beit": ("beit_base_patch16_224", None),
    "botnet": ("botnet26t_256", None),
    "caformer": ("caformer_s18", 64),
    "cait": ("cait_xxs24_224", None),
    "coat": ("coat_lite_tiny", None),
    "coat (parallel)": ("coat_tiny", None),
    "coatnet": ("coatnet_pico_rw_224", None),
    "convformer": ("convformer_s18", 64),
    "convit": ("convit_tiny", None),
    "convmixer": ("convmixer_768_32", 64),
    "convnext": ("convnext_atto", 64),
    "convnextv2": ("convnextv2_atto", 64),
    "cpubone": ("cpubone_nano", 64),
    "crossvit": ("crossvit_tiny_240", None),
    "cs3darknet": ("cs3darknet_s", 64),
    "csatv2": ("csatv2", None),
    "cspnet": ("cspresnet50", 64),
    "cspnext": ("cspnext_tiny", 64),
    "darknet": ("darknet17", 64),
    "davit": ("davit_tiny", 96),
    "deepseek_vit": ("deepseek_vit_412m", None),
    "deit": ("deit_tiny_distilled_patch16_224", None),
    "deit3": ("deit3_small_patch16_224", None),
    "densenet": ("densenet121", 64),
    "dla": ("dla46_c", 64),
    "dpn": ("dpn48b", 64),
    "ecaresnet": ("ecaresnet26t", 64),
    "edgenext": ("edgenext_xx_small", 64),
    "efficientformer": ("efficientformer_l1", None),
    "efficientformerv2": ("efficientformerv2_s0", None),
    "efficientnet": ("efficientnet_b0", 64),
    "efficientnet_cc": ("efficientnet_cc_b0_4e", 64),
    "efficientnet_lite": ("efficientnet_lite0", 64),
    "efficientnetv2": ("tf_efficientnetv2_b0", 64),
    "efficientvim": ("efficientvim_m1", None),
    "efficientvit_mit": ("efficientvit_b0", 64),
    "efficientvit_msra": ("efficientvit_m0", None),
    "eva02": ("eva02_tiny_patch14_224", None),
    "fasternet": ("fasternet_t0", 64),
    "fastvit": ("fastvit_t8", 64),
    "fbnet": ("fbnetc_100", 64),
    "focalnet": ("focalnet_tiny_srf", 64),
    "gcresnet": ("gcresnext26ts", 64),
    "gcvit": ("gcvit_xxtiny", None),
    "gemma4_vit": ("gemma4_vit_167m", None),
    "gernet": ("gernet_s", 64),
    "ghostnet": ("ghostnet_050", 64),
    "ghostnetv2": ("ghostnetv2_100", 64),
    "ghostnetv3": ("ghostnetv3_050", 64),
    "gmixer": ("gmixer_12_224", None),
    "gmlp": ("gmlp_ti16_224", None),
    "halonet": ("halonet26t", None),
    "hardcorenas": ("hardcorenas_a", 64),
    "hgnet": ("hgnetv2_b0", 64),
    "hiera": ("hiera_tiny_224", None),
    "hieradet_sam2": ("hieradet_small", None),
    "hrnet": ("hrnet_w18_small", 64),
    "iformer": ("iformer_t", 64),
    "inception_next": ("inception_next_atto", 64),
    "inception_resnet_v2": ("inception_resnet_v2", 128),
    "inception_v3": ("inception_v3", 128),
    "inception_v4": ("inception_v4", 128),
    "lambda_resnet": ("lambda_resnet26t", None),
    "lcnet": ("lcnet_035", 64),
    "lcnetv2": ("lcnetv2_small", 64),
    "levit": ("levit_128s", None),
    "levit_conv": ("levit_conv_128s", None),
    "lowformer": ("lowformer_b0", 64),
    "mambaout": ("mambaout_femto", 64),
    "maxvit": ("maxvit_pico_rw_256", None),
    "maxxvit": ("maxxvitv2_nano_rw_256", None),
    "mixer": ("mixer_s32_224", None),
    "mixnet": ("mixnet_s", 64),
    "mnasnet": ("mnasnet_050", 64),
    "mobilenetv1": ("mobilenetv1_100", 64),
    "mobilenetv2": ("mobilenetv2_035", 64),
    "mobilenetv3": ("mobilenetv3_small_050", 64),
    "mobilenetv4": ("mobilenetv4_conv_small_035", 64),
    "mobilenetv4_hybrid": ("mobilenetv4_hybrid_medium_075", 64),
    "mobilenetv5": ("mobilenetv5_base", 128),
    "mobileone": ("mobileone_s0", 64),
    "mobilevit": ("mobilevit_xxs", 64),
    "mobilevitv2": ("mobilevitv2_050", 64),
    "mvitv2": ("mvitv2_tiny", None),
    "naflexvit": ("naflexvit_base_patch16_gap", None),
    "nasnet": ("nasnetalarge", 96),
    "nest": ("nest_tiny", None),
    "nextvit": ("nextvit_small", 64),
    "nf_regnet": ("nf_regnet_b0", 64),
    "nfnet": ("nfnet_l0", 64),
    "pit": ("pit_ti_224", None),
    "pnasnet": ("pnasnet5large", 96),
    "poolformer": ("poolformer_s12", 64),
    "pvt_v2": ("pvt_v2_b0", 64),
    "qwen3_vit": ("qwen3_vit_88m", None),
    "rdnet": ("rdnet_tiny", 64),
    "regnetx": ("regnetx_002", 64),
    "regnety": ("regnety_002", 64),
    "regnetz": ("regnetz_005", 64),
    "repghost": ("repghostnet_050", 64),
    "repvgg": ("repvgg_a0", 64),
    "repvit": ("repvit_m0_9", 64),
    "res2net": ("res2net50_48w_2s", 64),
    "resmlp": ("resmlp_12_224", None),
    "resnest": ("resnest14d", 64),
    "resnet": ("resnet18", 64),
    "resnet (blur)": ("resnetblur18", 64),
    "resnet (clip)": ("resnet50_clip", None),
    "resnetv2": ("resnetv2_18", 64),
    "resnext": ("resnext26ts", 64),
    "rexnet": ("rexnet_100", 64),
    "samvit": ("samvit_base_patch16_224", None),
    "selecsls": ("selecsls42b", 64),
    "senet": ("legacy_seresnet18", 64),
    "sequencer": ("sequencer2d_s", None),
    "seresnet": ("seresnet18", 64),
    "shvit": ("shvit_s1", 64),
    "sknet": ("skresnet18", 64),
    "spnasnet": ("spnasnet_100", 64),
    "starnet": ("starnet_s050", 64),
    "swiftformer": ("swiftformer_xs", None),
    "swin": ("swin_tiny_patch4_window7_224", None),
    "swinv2": ("swinv2_tiny_window8_256", None),
    "swinv2_cr": ("swinv2_cr_tiny_224", None),
    "tiny_vit": ("tiny_vit_5m_224", None),
    "tinynet": ("tinynet_e", 64),
    "tnt": ("tnt_s_patch16_224", None),
    "tresnet": ("tresnet_m", 64),
    "twins (pcpvt)": ("twins_pcpvt_small", 64),
    "twins (svt)": ("twins_svt_small", 64),
    "vgg": ("vgg11", 64),
    "visformer": ("visformer_tiny", None),
    "vit": ("vit_tiny_patch16_224", None),
    "vit (dinov3)": ("vit_small_patch16_dinov3", None),
    "vit (hybrid)": ("vit_tiny_r_s16_p8_224", None),
    "vit (relpos)": ("vit_relpos_small_patch16_224", None),
    "vit (rope)": ("vit_small_patch16_rope_224", None),
    "vit (test)": ("test_vit", None),
    "vitamin": ("vitamin_small_224", None),
    "volo": ("volo_d1_224", None),
    "vovnet": ("ese_vovnet19b_slim", 64),
    "xception": ("legacy_xception", 64),
    "xception_aligned": ("xception41", 64),
    "xcit": ("xcit_nano_12_p16_224", None),
}


def torchvision_classifiers() -> list[tuple[str, int | None]]:
    """(`torchvision:NAME`, side of the input or None) of everything that maps an image to classes."""
    import torchvision

    names = torchvision.models.list_models(module=torchvision.models)
    return [(f"torchvision:{name}", _TORCHVISION_SIZES.get(name, _SMALL)) for name in names]


def is_one_more(spec: str) -> bool:
    """Whether a smaller model of the same family is in the list."""
    origin, _, name = spec.partition(":")
    return origin == "torchvision" and name not in _FIRST


def timm_models() -> list[tuple[str, int | None]]:
    """(`timm:NAME`, side of the input or None) of one small model of every family."""
    return [(f"timm:{name}", size) for name, size in TIMM.values()]
