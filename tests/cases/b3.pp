# B3: steady state, two sends face each other, each ahead of its receive
group pp = 0-1

r0: send F1->1; recv B0<-1
r1: send B0->0; recv F1<-0
