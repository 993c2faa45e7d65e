# A5: two unmatched ops of a rank that has finished normally

r0: R x<-1; R y<-1
r1: S x->0
r2: S z->1
