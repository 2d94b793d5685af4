from .overlap import OverlapIndex as OverlapIndex, build_index as build_index
