# C2: 4 stages on 2 ranks: the two sides order the messages of one edge differently
group pp = 0-1

r0: 0F0; S 0F0->1; 0F1; S 0F1->1; R 2F0<-1; 2F0; S 2F0->1
r1: R 1F0<-0; 1F0; S 1F0->0; R 3F0<-0; 3F0; R 1F1<-0; 1F1
