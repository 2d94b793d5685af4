from .c4 import read_bad_words as read_bad_words
