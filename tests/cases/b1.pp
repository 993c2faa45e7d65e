# B1: one edge, grouped on one side and separate on the other
world eager

r0: {S x->1, R x<-1}
r1: send x->0; recv x<-0
