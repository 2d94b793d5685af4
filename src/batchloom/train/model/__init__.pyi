from .generate import continue_text as continue_text
from .gpt_model import (
    GPT as GPT,
    IGNORED_LABEL as IGNORED_LABEL,
    estimate_parameter_count as estimate_parameter_count,
    make_parameter_groups as make_parameter_groups,
    pad_vocabulary as pad_vocabulary,
)
from .memory_estimate import (
    check_memory as check_memory,
    explain_memory_errors as explain_memory_errors,
    is_out_of_memory as is_out_of_memory,
)
from .model_folder import (
    compute_folder_fingerprint as compute_folder_fingerprint,
    copy_tokenizer as copy_tokenizer,
    describe_tokenizer_difference as describe_tokenizer_difference,
)
from .pretrained import (
    PretrainedModel as PretrainedModel,
    build_meta_model as build_meta_model,
    check_size as check_size,
    get_max_positions as get_max_positions,
    load_pretrained as load_pretrained,
    read_model_config as read_model_config,
)
