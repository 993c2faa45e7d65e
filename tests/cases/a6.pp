# A6: the host never comes back from its first isend on a pair

r0: S x->1
r1: wait signal 0 never
