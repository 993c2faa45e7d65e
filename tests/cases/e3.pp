# E3: a barrier before the send here, after the receive there

r0: barrier; S x->1
r1: R x<-0; barrier
