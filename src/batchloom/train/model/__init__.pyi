from .generate import continue_text as continue_text
from .gpt_model import (
    GPT as GPT,
    IGNORED as IGNORED,
    padded_vocabulary as padded_vocabulary,
    parameter_count as parameter_count,
    parameter_groups as parameter_groups,
)
from .memory_estimate import (
    check_memory as check_memory,
    is_short as is_short,
    memory_explained as memory_explained,
)
from .model_folder import (
    copy_tokenizer as copy_tokenizer,
    folder_fingerprint as folder_fingerprint,
    tokenizer_note as tokenizer_note,
)
from .pretrained import (
    Pretrained as Pretrained,
    blueprint as blueprint,
    check_size as check_size,
    load as load,
    longest_row as longest_row,
    read_model_config as read_model_config,
)
