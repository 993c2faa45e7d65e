# B4: a lone send meets a batch that also sends
group pp = 0-1 eager

r0: F3; send F3->1; recv B0<-1; B0
r1: {R F3<-0, S B0->0}; F3
