from .c4 import read_bad_words as read_bad_words
from .word_statistics import U64 as U64
