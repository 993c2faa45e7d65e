# C1: two sends wait for each other

r0: S x->1; R x<-1
r1: S x->0; R x<-0
