# E2: two gradients are received and one is sent
group pp = 0-1

r0: F0; S F0->1; S F0.1->1; {R B0<-1, R B0.1<-1}; B0; {R B1<-1, R B1.1<-1}; B1
r1: R F0<-0; R F0.1<-0; F0; B0; {S B0->0}; B1; {S B1->0}
