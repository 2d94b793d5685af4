"""Small transformers processors, in memory and in folders, built without the Hub."""

import json

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SIDE = 28
TEXT = "hello world what is this image of a cat \n\n \n who are they?"


def make_tokenizer(extra, named_tokens=None, **settings):
    """Return a byte-level tokenizer with these control tokens."""
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *extra]
    trainer = trainers.BpeTrainer(
        vocab_size=300 + len(control),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=control,
    )
    bpe.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=named_tokens or {},
        **settings,
    )


def qwen2_vl(name="Qwen2VLProcessor", **settings):
    """Return Qwen2-VL or a successor without video processing.

    Video processing needs torchvision.
    """
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class WithoutVideo(getattr(transformers, name)):
        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    control = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    image_processor = Qwen2VLImageProcessorPil(**{"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 64, **settings})
    return WithoutVideo(image_processor=image_processor, tokenizer=make_tokenizer(control), video_processor=None)


def qwen2_5_vl():
    return qwen2_vl("Qwen2_5_VLProcessor")


def qwen3_vl():
    return qwen2_vl("Qwen3VLProcessor", patch_size=16, min_pixels=32 * 32, max_pixels=32 * 32 * 60)


def llava():
    from transformers import LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    size = {"height": SIDE, "width": SIDE}
    return LlavaProcessor(
        image_processor=LlavaImageProcessorPil(size=size, crop_size=size),
        tokenizer=make_tokenizer(["<image>"], {"image_token": "<image>"}),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def llava_next():
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    image_processor = LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
    )
    return LlavaNextProcessor(
        image_processor=image_processor,
        tokenizer=make_tokenizer(["<image>"], {"image_token": "<image>"}),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def idefics3():
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tile_tokens = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    control = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    image_processor = Idefics3ImageProcessorPil(size={"longest_edge": 3 * 56}, max_image_size={"longest_edge": 56})
    tokenizer = make_tokenizer([*control, *tile_tokens])
    return Idefics3Processor(image_processor=image_processor, tokenizer=tokenizer, image_seq_len=4)


def smolvlm():
    from transformers import SmolVLMProcessor
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    class WithoutVideo(SmolVLMProcessor):
        def check_argument_for_proper_class(self, name, argument):
            return type(argument)

    tile_tokens = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    control = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    image_processor = SmolVLMImageProcessorPil(size={"longest_edge": 3 * 56}, max_image_size={"longest_edge": 56})
    tokenizer = make_tokenizer([*control, "<video>", *tile_tokens])
    return WithoutVideo(image_processor=image_processor, tokenizer=tokenizer, video_processor=None, image_seq_len=4)


def aya_vision():
    """Return a processor whose token arithmetic batchloom does not know."""
    from transformers import AyaVisionProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokens = ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "<|IMG_PATCH|>"]
    tokenizer = make_tokenizer(["<image>", *tokens, "TILE", "TILE_GLOBAL"])
    image_processor = GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return AyaVisionProcessor(image_processor=image_processor, tokenizer=tokenizer, patch_size=14, img_size=SIDE)


def gemma3():
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    named_tokens = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    image_processor = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    tokenizer = make_tokenizer(list(named_tokens.values()), named_tokens)
    return Gemma3Processor(image_processor=image_processor, tokenizer=tokenizer, image_seq_length=4)


def qwen2_audio(**settings):
    from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

    control = ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    return Qwen2AudioProcessor(
        feature_extractor=WhisperFeatureExtractor(feature_size=80, **settings),
        tokenizer=make_tokenizer(control),
    )


PROCESSORS = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "llava": llava,
    "llava_next": llava_next,
    "idefics3": idefics3,
    "smolvlm": smolvlm,
    "gemma3": gemma3,
    "qwen2_audio": qwen2_audio,
}


def save_processor(processor, folder):
    """Write a processor as ``save_pretrained`` does; return the folder."""
    if getattr(processor, "video_processor", "none") is not None:
        processor.save_pretrained(folder)
        return folder
    # A processor without video processing cannot be saved in one call.
    processor.tokenizer.save_pretrained(folder)
    processor.image_processor.save_pretrained(folder)
    class_entry = {"processor_class": type(processor).__bases__[0].__name__}
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **class_entry}))
    if hasattr(processor, "image_seq_len"):
        config = {**class_entry, "image_seq_len": processor.image_seq_len}
        (folder / "processor_config.json").write_text(json.dumps(config))
    return folder
