from .gpt_model import pad_vocabulary as pad_vocabulary
from .pretrained import build_meta_model as build_meta_model, load_pretrained as load_pretrained
