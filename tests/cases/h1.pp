# H1: 4 microbatches on one rank, 5 on the other
group pp = 0-1

r0:
  step GPipe n=4 { F0; S F0->1; F1; S F1->1; F2; S F2->1; F3; S F3->1; R B0<-1; B0 }
r1:
  step GPipe n=5 { R F0<-0; F0; R F1<-0; F1; R F2<-0; F2; R F3<-0; F3; R F4<-0; F4 }
