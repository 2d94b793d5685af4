from .overlap_index import Overlap as Overlap, build_index as build_index
