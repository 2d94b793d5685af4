from .c4 import bad_words as bad_words
from .word_statistics import U64 as U64
