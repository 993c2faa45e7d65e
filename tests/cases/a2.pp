# A2: the first batched P2P of a new group, and two of its ranks never come
group pp = 0-3

r0: {S x->1}
r1: {R x<-0}
r2-3:
